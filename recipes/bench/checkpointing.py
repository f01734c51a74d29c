"""Gradient checkpointing, its cost and its saving: training with it off, on, and on for everything but matrix products.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=bench/checkpointing model=qwen3_4b model.init=random
    Rows:    python launch/run.py hardware=mi350x method=bench/checkpointing model=qwen3_4b model.init=random method.args.batch_size=8

`off` keeps every activation for the backward pass; `on` keeps the input of each layer and computes the rest again (use_reentrant=False, as
transformers does); `selective` keeps the results of matrix products and attention too, which cost most to compute again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from recipes.bench.language_model import Steps, TrainingConfig, build_steps, random_tokens, speed
from recipes.bench.series import Column, Row, Table, device_of, measure_rows, result
from recipes.common.names import named
from recipes.common.program import main

MODES = ("off", "on", "selective")
ATEN = torch.ops.aten
KEPT = [
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.bmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclass
class CheckpointingConfig(TrainingConfig):
    """`modes` in the order they are measured; `off` is what the others are compared with. Raises UserError."""

    modes: list[str] = named(lambda: MODES)
    batch_size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("modes")


def checkpointing(config: DictConfig) -> dict[str, Any]:
    args = CheckpointingConfig(**config.trainer_args)
    steps = build_steps(config, args, device_of(args))
    tokens = random_tokens(config, args, args.batch_size, steps.device)
    table = Table(
        "checkpointing",
        figure="slowdown",
        higher_is_better=False,
        columns=[
            Column("mode", "checkpointing"),
            Column("batch_size", "batch"),
            Column("tokens_per_second", "tokens/s", 0),
            Column("ms", "ms/step", 1),
            Column("slowdown", "times off", 2),
            Column("memory_gb", "peak GB", 1),
            Column("memory_share", "of off", 2),
            Column("mfu", "MFU", 2),
        ],
        notes=["MFU counts what the model needs, not what is computed again."],
    )
    same = {"model": config.model.name, "sequence": args.sequence, "batch_size": args.batch_size}
    cases = [{**same, "mode": mode, "checkpointing": mode != "off"} for mode in args.modes]
    rows = measure_rows(config, args, table, cases, lambda case: one(case, steps, tokens, config, args), [])
    off = next((row for row in rows if row["mode"] == "off"), {})
    for row in rows:
        row["slowdown"], row["memory_share"] = share(row, off, "ms"), share(row, off, "memory_gb")
    return result(config, args, table, rows)


def one(case: Row, steps: Steps, tokens: torch.Tensor, config: DictConfig, args: TrainingConfig) -> Row:
    switch(steps, case["mode"])
    return speed(steps, tokens, config, args)


def switch(steps: Steps, mode: str) -> None:
    steps.optimizer.zero_grad()  # of a mode that ran out of memory in the middle of a backward pass
    steps.model.gradient_checkpointing_disable()
    if mode == "on":
        steps.model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode == "selective":
        context = functools.partial(create_selective_checkpoint_contexts, KEPT)
        steps.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})


def share(row: Row, off: Row, key: str) -> float | None:
    """Of the figure without checkpointing; None where either was not measured."""
    return row[key] / off[key] if row.get(key) and off.get(key) else None


if __name__ == "__main__":
    main(checkpointing)
