"""Train on 1, 2, 4 and 8 GPUs with DDP and FSDP2: the MI350X report's fourth benchmark.

Models and steps are as in bench/transformer. Every GPU trains the same number of sequences. One
run measures all numbers of GPUs up to the number that it has. For n GPUs, the first n ranks train
and the others wait without using their GPUs. The row for one GPU is the loop without DDP or FSDP2;
efficiency is relative to this row. Time and memory are the largest of all ranks. Both strategies
reduce gradients in the dtype of the weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from recipes.bench import consensus, gpt
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, measure
from recipes.bench.timing import weights_dtype
from recipes.rank.names import name_field
from recipes.rank.program import main

STRATEGIES = ("ddp", "fsdp")


@dataclass
class ScalingConfig(SeriesConfig):
    """Arguments. `num_gpus`: numbers above the run's number of GPUs are skipped.

    `batch` is in sequences per GPU, `sequence` in tokens. Null: the default of each model size.
    """

    models: list[str] = name_field(lambda: gpt.SIZES, [])
    num_gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    strategies: list[str] = name_field(lambda: STRATEGIES)
    batch: int | None = None
    sequence: int | None = None
    warmup: int = 5
    steps: int = 20


COLUMNS = (
    "model num_gpus strategy batch global_batch sequence tokens_per_second efficiency "
    "tflops tflops_per_gpu memory_gb ms"
)


def scaling(config: DictConfig) -> dict[str, Any]:
    args = ScalingConfig(**config.trainer_args)
    device = device_of(args)
    weights_dtype(config)  # rejects an unsupported precision before the first row
    with consensus.control_group(device) as control:
        world = dist.get_world_size()
        notes = [gpt.note(config)]
        unavailable = [str(n) for n in args.num_gpus if n > world]
        if unavailable:
            notes.append(
                f"{', '.join(unavailable)} GPUs are left out, because this run has {world}. "
                f"To measure them, use topology.num_gpus={max(args.num_gpus)}."
            )
        # torch requires every rank to create every group, even those it does not join.
        counts = sorted(n for n in set(args.num_gpus) if 1 < n <= world)
        groups = {n: dist.new_group(list(range(n))) for n in counts}
        table = Table("scaling", COLUMNS, figure="tokens_per_second", notes=notes)

        def work(case: Row) -> Row:
            n = case["num_gpus"]
            train = None  # None for a rank that only waits
            if dist.get_rank() < n:
                size = gpt.SIZES[case["model"]]
                group = groups.get(n)
                train = functools.partial(gpt.train_case, size, case, config, args, device, group)
            figures = consensus.slowest_rank(control, train)
            speed = case["global_batch"] * case["sequence"] / figures["ms"] * 1e3
            tflops = 6 * figures["parameters"] * speed / 1e12
            rates = {"tokens_per_second": speed, "tflops": tflops, "tflops_per_gpu": tflops / n}
            return {**figures, **rates}

        return measure(config, args, table, cases(args, world), work, compare)


def compare(rows: list[Row]) -> None:
    alone = {row["model"]: row.get("tokens_per_second") for row in rows if row["num_gpus"] == 1}
    for row in rows:
        speed, base_speed = row.get("tokens_per_second"), alone.get(row["model"])
        row["efficiency"] = speed / row["num_gpus"] / base_speed if speed and base_speed else None


def cases(args: ScalingConfig, world: int) -> list[Row]:
    """Return the cases of each model. One GPU has one case, because it uses no strategy."""
    rows = []
    for name in args.models:
        size = gpt.shape(name, args.batch, args.sequence)
        for n in sorted(n for n in set(args.num_gpus) if n <= world):
            for strategy in args.strategies[:1] if n == 1 else args.strategies:
                case = {"model": name, "num_gpus": n, "strategy": strategy}
                rows.append({**case, **size, "global_batch": n * size["batch"]})
    return rows


if __name__ == "__main__":
    main(scaling)
