"""Measure the cost and the savings of gradient checkpointing.

`off` saves all activations for the backward pass. `on` saves the input of each layer and recomputes
the rest (use_reentrant=False, as in transformers). `selective` also saves the results of matrix
products and attention, which are the most expensive to recompute.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from recipes.bench.benchmark import Row, Table, device_of, measure
from recipes.bench.language_model import TrainingConfig, build, random_tokens, speed
from recipes.rank.names import name_field
from recipes.rank.program import main

MODES = ("off", "on", "selective")
ATEN = torch.ops.aten
SAVED = [
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
    """Arguments. `modes`: measured in this order, and compared with `off`."""

    modes: list[str] = name_field(lambda: MODES)
    batch_size: int = 2


COLUMNS = "mode batch_size tokens_per_second ms slowdown memory_gb memory_share mfu"


def checkpointing(config: DictConfig) -> dict[str, Any]:
    args = CheckpointingConfig(**config.trainer_args)
    device = device_of(args)
    model = build(config, device)
    tokens = random_tokens(config, args, args.batch_size, device)
    note = "slowdown: the time divided by off's. MFU does not count recomputed operations."
    table = Table("checkpointing", COLUMNS, "slowdown", higher_is_better=False, notes=[note])
    same = {"model": config.model.name, "sequence": args.sequence, "batch_size": args.batch_size}
    cases = [{**same, "mode": mode, "checkpointing": mode != "off"} for mode in args.modes]

    def work(case: Row) -> Row:
        switch(model, case["mode"])
        return speed(model, tokens, config, args)

    def compare(rows: list[Row]) -> None:
        off = next((row for row in rows if row["mode"] == "off"), {})
        for row in rows:
            for key, figure in (("slowdown", "ms"), ("memory_share", "memory_gb")):
                both = row.get(figure) and off.get(figure)
                row[key] = row[figure] / off[figure] if both else None

    return measure(config, args, table, cases, work, compare)


def switch(model: nn.Module, mode: str) -> None:
    model.gradient_checkpointing_disable()
    if mode == "on":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode == "selective":
        context = functools.partial(create_selective_checkpoint_contexts, SAVED)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})


if __name__ == "__main__":
    main(checkpointing)
