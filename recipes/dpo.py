"""Direct preference optimization: raise the chosen answer's likelihood above the rejected one's, measured against a frozen copy.

Started by the launcher, one process a GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=dpo model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x topology=fsdp method=dpo model=qwen3_8b

Follows the paper (arXiv:2305.18290). The reference is the model as training starts, not the one that made the pairs; on generated
problems the rejected answer is the right one to another problem of the same task.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from trl import DPOConfig, DPOTrainer

from recipes.common.checkpoint import AtomicCheckpoints
from recipes.common.data import load, texts
from recipes.common.data_prepare import PreparedRows
from recipes.common.metrics import Metrics
from recipes.common.model import adapter_config, build_model, build_tokenizer
from recipes.common.program import main
from recipes.common.selection import heldout
from recipes.common.training import build_arguments, train


class Trainer(PreparedRows, AtomicCheckpoints, DPOTrainer):
    """TRL's trainer, saving atomically, with rows prepared once."""


def dpo(config: DictConfig) -> dict[str, Any]:
    args = build_arguments(DPOConfig, config)
    loaded = load(config.data, "dpo")
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    trainer = Trainer(
        model=build_model(config),
        # With an adapter, the reference is the same weights with the adapter off. TRL would load one by name, which random weights lack.
        ref_model=None if config.adapter.rank or args.precompute_ref_log_probs else build_model(config),
        args=args,
        config=config,
        loaded=loaded,
        heldout=heldout(config),
        processing_class=tokenizer,
        peft_config=adapter_config(config),
    )
    result = train(config, trainer, Metrics(config, reference=not args.precompute_ref_log_probs))
    return {**result, **loaded.sha256()}


if __name__ == "__main__":
    main(dpo)
