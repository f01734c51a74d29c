"""The largest and the fastest batch of training a model: tokens/s and memory over batch sizes, until memory runs out.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=bench/batch_size model=qwen3_4b model.init=random
    LoRA:    python launch/run.py hardware=mi350x method=bench/batch_size model=qwen3_8b model.init=random adapter=lora

`model`, `adapter` and `precision` are those of a run; the rows are random tokens, all of `sequence` tokens. What a step is stands in
recipes/bench/language_model.py. `mode=plan find=largest_batch` with method=sft plans what this measures.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from recipes.bench.language_model import Steps, TrainingConfig, build_steps, random_tokens, speed
from recipes.bench.series import OUT_OF_MEMORY, Column, Row, Table, device_of, measure_rows, result
from recipes.common.errors import UserError
from recipes.common.program import main


@dataclass
class BatchSizeConfig(TrainingConfig):
    """`batch_sizes`: rows of a step, rising. `gradient_checkpointing` as a run of method=sft has it. Raises UserError."""

    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    gradient_checkpointing: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("batch_sizes")
        if any(a >= b for a, b in itertools.pairwise(self.batch_sizes)):
            raise UserError(f"method.args.batch_sizes={self.batch_sizes}: each is larger than the one before.")


def batch_size(config: DictConfig) -> dict[str, Any]:
    args = BatchSizeConfig(**config.trainer_args)
    steps = build_steps(config, args, device_of(args))
    if args.gradient_checkpointing:
        steps.model.gradient_checkpointing_enable({"use_reentrant": False})
    table = Table(
        "batch_size",
        figure="tokens_per_second",
        columns=[
            Column("batch_size", "batch"),
            Column("tokens_per_second", "tokens/s", 0),
            Column("ms", "ms/step", 1),
            Column("tflops", "TFLOPS", 1),
            Column("mfu", "MFU", 2),
            Column("memory_gb", "peak GB", 1),
        ],
    )
    cases = [{"model": config.model.name, "sequence": args.sequence, "batch_size": size} for size in args.batch_sizes]
    rows: list[Row] = []
    measure_rows(config, args, table, cases, lambda case: one(case, rows, steps, config, args), rows)
    found = best(rows)
    line = "largest batch {largest}, fastest {fastest}".format(**found) if found else "no batch size could be measured"
    table.notes.append(f"{config.model.name}, rows of {args.sequence} tokens: {line}.")
    return result(config, args, table, rows, **found)


def one(case: Row, rows: list[Row], steps: Steps, config: DictConfig, args: TrainingConfig) -> Row:
    """Raises UserError after a size that was out of memory: a larger one would be, too."""
    out = next((row["batch_size"] for row in rows if row["error"] == OUT_OF_MEMORY), None)
    if out is not None:
        raise UserError(f"skipped: {out} was out of memory")
    return speed(steps, random_tokens(config, args, case["batch_size"], steps.device), config, args)


def best(rows: list[Row]) -> dict[str, int]:
    """`largest` that could be trained, and the `fastest`: of equal ones the smaller. Empty where none could."""
    measured = [row for row in rows if row["error"] is None]
    if not measured:
        return {}
    fastest = max(measured, key=lambda row: row["tokens_per_second"])
    return {"largest": max(row["batch_size"] for row in measured), "fastest": fastest["batch_size"]}


if __name__ == "__main__":
    main(batch_size)
