"""Find the largest and the fastest batch for training a model: tokens/s and memory by batch size.

Choose model=, adapter= and precision= as for a run. Every row is `sequence` random tokens.
recipes/bench/language_model.py defines a step. To predict the largest batch without a GPU, use
method=sft mode=plan find=largest_batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from recipes.bench.benchmark import Row, Table, device_of, measure, skip_larger
from recipes.bench.language_model import TrainingConfig, build, random_tokens, speed
from recipes.rank.program import main


@dataclass
class BatchSizeConfig(TrainingConfig):
    """Arguments. `batch_sizes`: rows per step. `gradient_checkpointing`: as in method=sft."""

    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    gradient_checkpointing: bool = True


COLUMNS = "batch_size tokens_per_second ms tflops mfu memory_gb"


def batch_size(config: DictConfig) -> dict[str, Any]:
    args = BatchSizeConfig(**config.trainer_args)
    device = device_of(args)
    model = build(config, device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    table = Table("batch_size", COLUMNS, figure="tokens_per_second")
    cases = [
        {"model": config.model.name, "sequence": args.sequence, "batch_size": size}
        for size in sorted(set(args.batch_sizes))
    ]

    def work(case: Row) -> Row:
        tokens = random_tokens(config, args, case["batch_size"], device)
        return speed(model, tokens, config, args)

    def complete(rows: list[Row]) -> Row:
        sizes = best(rows)
        line = ", ".join(f"{name} batch {size}" for name, size in sizes.items()) or "no batch ran"
        table.notes.append(f"{config.model.name}, rows of {args.sequence} tokens: {line}.")
        return sizes

    return measure(config, args, table, cases, work, complete, skip_larger("batch_size"))


def best(rows: list[Row]) -> dict[str, int]:
    """Return the `largest` and `fastest` size among the measured rows, or {} if there is none."""
    measured = [row for row in rows if row["error"] is None]
    if not measured:
        return {}
    fastest = max(measured, key=lambda row: row["tokens_per_second"])
    return {"largest": max(row["batch_size"] for row in measured), "fastest": fastest["batch_size"]}


if __name__ == "__main__":
    main(batch_size)
