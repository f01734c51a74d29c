"""Train on 1, 2, 4 and 8 GPUs with DDP and FSDP2: the MI350X report's fourth benchmark.

Models and step are from bench/transformer; every GPU has the same number of sequences. One run
measures every number n of GPUs up to its own: the first n ranks train, and the others wait without
touching their GPUs. One GPU averages and shards nothing, so its row is the plain loop,
and efficiency is relative to it. Time is the slowest rank's, memory the fullest rank's.
Gradients are reduced in the dtype of the weights under both strategies.
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
    """Hold the arguments. `num_gpus`: numbers above that of the run's GPUs are skipped.

    `batch` (sequences per GPU) and `sequence` (tokens) null: the defaults of each model size.
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
    with consensus.joined(device) as control:
        world = dist.get_world_size()
        notes = [gpt.note(config)]
        unavailable = [str(n) for n in args.num_gpus if n > world]
        if unavailable:
            notes.append(
                f"{', '.join(unavailable)} GPUs are left out: this run has {world}. "
                "Use: topology.num_gpus=<n>."
            )
        # torch requires every rank to create every group, even those it does not join.
        counts = sorted(n for n in set(args.num_gpus) if 1 < n <= world)
        groups = {n: dist.new_group(list(range(n))) for n in counts}
        table = Table("scaling", COLUMNS, figure="tokens_per_second", notes=notes)

        def work(case: Row) -> Row:
            n = case["num_gpus"]
            mine = None  # None for a rank that only waits
            if dist.get_rank() < n:
                size = gpt.SIZES[case["model"]]
                group = groups.get(n)
                mine = functools.partial(gpt.trained, size, case, config, args, device, group)
            figures = consensus.slowest(control, mine)
            speed = case["global_batch"] * case["sequence"] / figures["ms"] * 1e3
            tflops = 6 * figures["parameters"] * speed / 1e12
            rates = {"tokens_per_second": speed, "tflops": tflops, "tflops_per_gpu": tflops / n}
            return {**figures, **rates}

        return measure(config, args, table, cases(args, world), work, compare)


def compare(rows: list[Row]) -> None:
    """Add the efficiency relative to one GPU."""
    alone = {row["model"]: row.get("tokens_per_second") for row in rows if row["num_gpus"] == 1}
    for row in rows:
        speed, base_speed = row.get("tokens_per_second"), alone.get(row["model"])
        row["efficiency"] = speed / row["num_gpus"] / base_speed if speed and base_speed else None


def cases(args: ScalingConfig, world: int) -> list[Row]:
    """Return the cases of each model. One GPU comes once, since all strategies are equal there."""
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
