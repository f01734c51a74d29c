"""Direct preference optimization: raise the chosen answer's likelihood above the rejected one's, measured against a frozen copy.

Started by the launcher, one process a GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=dpo model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x topology=fsdp method=dpo model=qwen3_8b

Follows the paper (arXiv:2305.18290). The reference is the model as training starts, not the one that made the pairs; on generated
problems the rejected answer is the right one to another problem of the same task.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig
from trl import DPOConfig, DPOTrainer

from recipes.common.checkpoint import HEARTBEAT, AtomicCheckpoints
from recipes.common.data import texts
from recipes.common.data_prepare import PreparedRows, load_once
from recipes.common.generation import beat_by_token
from recipes.common.metrics import Metrics
from recipes.common.model import adapter_config, build_model, build_tokenizer
from recipes.common.program import main
from recipes.common.selection import heldout
from recipes.common.training import build_arguments, train


class Trainer(PreparedRows, AtomicCheckpoints, DPOTrainer):
    """TRL's trainer, saving atomically, with rows prepared once."""

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """TRL's, whose main rank writes a file that all read: of rows in memory each would look in a temporary directory of its own."""
        shared = Path(self._config.run_dir) / ".reference"
        shared.mkdir(exist_ok=True)
        dataset._get_cache_file_path = lambda fingerprint: str(shared / f"{fingerprint}.arrow")
        with beat_by_token(self.ref_model or self.model, Path(self._config.run_dir) / HEARTBEAT):
            return super()._precompute_ref_logps(dataset, name, batch_size)


def dpo(config: DictConfig) -> dict[str, Any]:
    args = build_arguments(DPOConfig, config)
    loaded = load_once(config, "dpo")
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    # Under FSDP the model is whole until it trains, and TRL measures with a reference beforehand too (TRL 1.16, dpo_trainer.py:908). It
    # would load that by name, without a revision, and random weights have none.
    measures = not args.precompute_ref_log_probs or config.topology.strategy == "fsdp"
    trainer = Trainer(
        model=build_model(config),
        # With an adapter, the reference is the same weights with the adapter off.
        ref_model=build_model(config) if measures and not config.adapter.rank else None,
        args=args,
        config=config,
        loaded=loaded,
        heldout=heldout(config),
        processing_class=tokenizer,
        peft_config=adapter_config(config),
    )
    if args.precompute_ref_log_probs:
        trainer.ref_model = None  # TRL frees only what it has loaded itself
    result = train(config, trainer, Metrics(config, reference=not args.precompute_ref_log_probs))
    return {**result, **loaded.sha256()}


if __name__ == "__main__":
    main(dpo)
