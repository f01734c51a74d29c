"""Direct preference optimization: make the chosen answer likelier than the rejected one.

Started by the launcher, one process per GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=dpo model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x topology=fsdp method=dpo model=qwen3_8b

Follows the paper (arXiv:2305.18290), with the model at the start of training as frozen reference,
not the one that made the pairs. For generated problems the rejected answer is the right one to
another problem of the same task.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig
from trl import DPOConfig, DPOTrainer

from recipes.data.data_load import texts
from recipes.data.data_prepare import PreparedRows, load_once
from recipes.measure.metrics import Metrics
from recipes.models import head
from recipes.models.layers import CompiledLayers
from recipes.models.model_build import adapter_config, build_model, build_tokenizer
from recipes.rank.program import main
from recipes.sampling.generation import beat_by_token
from recipes.training.checkpoint import HEARTBEAT, AtomicCheckpoints
from recipes.training.selection import heldout
from recipes.training.step import OrderedRows
from recipes.training.train_loop import build_arguments, train


class Trainer(CompiledLayers, OrderedRows, PreparedRows, AtomicCheckpoints, DPOTrainer):
    """Extend TRL's trainer: rows are prepared once and ordered, checkpoints are atomic."""

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Compute the reference's log-probabilities once, on the main rank, into a shared file.

        For rows in memory, each rank would otherwise look in its own temporary directory.
        """
        shared = Path(self._config.run_dir) / ".reference"
        shared.mkdir(exist_ok=True)
        dataset._get_cache_file_path = lambda fingerprint: str(shared / f"{fingerprint}.arrow")
        with beat_by_token(self.ref_model or self.model, Path(self._config.run_dir) / HEARTBEAT):
            return super()._precompute_ref_logps(dataset, name, batch_size)


def dpo(config: DictConfig) -> dict[str, Any]:
    args = build_arguments(DPOConfig, config)
    if config.topology.strategy != "zero3":  # zero3 gathers the head only for the forward pass
        head.use_stored_head()
    loaded = load_once(config, "dpo")
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    # Under FSDP the model is whole until it trains, so TRL needs a reference model even to
    # precompute (1.16, dpo_trainer.py:908). TRL itself would load one by name, without a revision
    # and never with random weights.
    measures = not args.precompute_ref_log_probs or config.topology.strategy == "fsdp"
    trainer = Trainer(
        model=build_model(config),
        # With an adapter, the reference is the model with the adapter off.
        ref_model=build_model(config) if measures and not config.adapter.rank else None,
        args=args,
        config=config,
        loaded=loaded,
        heldout=heldout(config),
        processing_class=tokenizer,
        peft_config=adapter_config(config),
    )
    if args.precompute_ref_log_probs:
        trainer.ref_model = None  # TRL frees only models that it loaded
    result = train(config, trainer, Metrics(config, reference=not args.precompute_ref_log_probs))
    return {**result, **loaded.sha256()}


if __name__ == "__main__":
    main(dpo)
