"""Train with direct preference optimization: make chosen answers likelier than rejected ones.

The launcher starts this program, one process per GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=dpo model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x topology=fsdp method=dpo model=qwen3_8b

As in the paper (arXiv:2305.18290), but the reference is the model at the start of training, not the
model that generated the pairs. For generated problems, the rejected answer is the correct answer to
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
from recipes.training.communication import LeanCommunication
from recipes.training.selection import heldout
from recipes.training.step import OrderedRows
from recipes.training.train_loop import build_arguments, train
from recipes.training.trainer_errors import ReportedRejections


class Trainer(
    CompiledLayers,
    LeanCommunication,
    OrderedRows,
    PreparedRows,
    AtomicCheckpoints,
    ReportedRejections,
    DPOTrainer,
):
    """TRL's trainer with compiled layers, shared prepared rows and atomic checkpoints."""

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Compute the reference's log-probabilities once, and share them with all ranks in a file.

        Otherwise, each rank would look for them in its own temporary directory.
        """
        cache = Path(self._config.run_dir) / ".reference"
        cache.mkdir(exist_ok=True)
        dataset._get_cache_file_path = lambda fingerprint: str(cache / f"{fingerprint}.arrow")
        with beat_by_token(self.ref_model or self.model, Path(self._config.run_dir) / HEARTBEAT):
            return super()._precompute_ref_logps(dataset, name, batch_size)


def dpo(config: DictConfig) -> dict[str, Any]:
    args = build_arguments(DPOConfig, config)
    if config.topology.strategy != "zero3":  # ZeRO-3 gathers the head only for the forward pass
        head.use_stored_head()
    loaded = load_once(config, "dpo")
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    # Under FSDP, TRL needs a reference model even to precompute (1.16, dpo_trainer.py:908). TRL
    # would load it by name, without a revision, which is impossible for random weights.
    needs_reference = not args.precompute_ref_log_probs or config.topology.strategy == "fsdp"
    trainer = Trainer(
        model=build_model(config),
        # With an adapter, the reference is the model with the adapter disabled.
        ref_model=build_model(config) if needs_reference and not config.adapter.rank else None,
        args=args,
        config=config,
        loaded=loaded,
        heldout=heldout(config),
        processing_class=tokenizer,
        peft_config=adapter_config(config),
    )
    if args.precompute_ref_log_probs:
        trainer.ref_model = None  # free its memory; TRL does this only for models that it loaded
    result = train(config, trainer, Metrics(config, reference=not args.precompute_ref_log_probs))
    return {**result, **loaded.sha256()}


if __name__ == "__main__":
    main(dpo)
