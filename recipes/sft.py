"""Train with supervised fine-tuning: next-token cross-entropy on completions.

The launcher starts this program, one process per GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=sft model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x topology=fsdp method=sft model=qwen3_8b

If rows have a prompt and a completion, the loss covers only the completion (TRL's
`completion_only_loss`).
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from trl import SFTConfig, SFTTrainer

from recipes.data.data_curriculum import Curriculum
from recipes.data.data_load import texts
from recipes.data.data_prepare import PreparedRows, load_once
from recipes.measure.metrics import Metrics
from recipes.models.layers import CompiledLayers
from recipes.models.model_build import adapter_config, build_model, build_tokenizer
from recipes.rank.program import main
from recipes.training.checkpoint import AtomicCheckpoints
from recipes.training.communication import LeanCommunication
from recipes.training.selection import heldout
from recipes.training.step import FastStep
from recipes.training.train_loop import build_arguments, train
from recipes.training.trainer_errors import ReportedRejections


class Trainer(
    CompiledLayers,
    LeanCommunication,
    FastStep,
    Curriculum,
    PreparedRows,
    AtomicCheckpoints,
    ReportedRejections,
    SFTTrainer,
):
    """TRL's trainer with fast steps, shared prepared rows, curriculum and atomic checkpoints."""


def sft(config: DictConfig) -> dict[str, Any]:
    args = build_arguments(SFTConfig, config)
    loaded = load_once(config, "sft")
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    trainer = Trainer(
        model=build_model(config),
        args=args,
        config=config,
        loaded=loaded,
        heldout=heldout(config),
        processing_class=tokenizer,
        peft_config=adapter_config(config),
    )
    trainer.use_curriculum(config.data, config.seed)
    result = train(config, trainer, Metrics(config))
    return {**result, **loaded.sha256()}


if __name__ == "__main__":
    main(sft)
