"""Training on 1, 2, 4 and 8 GPUs with DDP and with FSDP2, each as many sequences a GPU: the MI350X report's fourth benchmark.

Started by the launcher:

    8 GPUs:       python launch/run.py hardware=mi350x method=bench/scaling precision.weights=bf16
    13B, by DDP:  python launch/run.py hardware=mi350x method=bench/scaling precision.weights=bf16 method.args.models=[13b] \
                  method.args.batch=8 method.args.num_gpus=[1,8] method.args.strategies=[ddp]

The models and the step are bench/transformer's. One run measures every number of GPUs up to its own: the first n ranks train, the others
wait without touching their GPUs. On one GPU there is nothing to average or to shard, so that row, which efficiency is measured against, is
the plain loop. Time is the slowest rank's, memory the fullest one's. Gradients travel in the dtype of the weights, under both strategies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from recipes.bench import gpt, ranks
from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure
from recipes.bench.training import fresh, timed, training_step, weights_dtype
from recipes.common.errors import UserError
from recipes.common.names import named
from recipes.common.program import main

STRATEGIES = ("ddp", "fsdp")


@dataclass
class ScalingConfig(SeriesConfig):
    """`num_gpus`: those that the run does not have are left out. `batch` (sequences a GPU) and `sequence` (tokens) empty: each size's own.

    Raises UserError.
    """

    models: list[str] = named(lambda: gpt.SIZES, [])
    num_gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    strategies: list[str] = named(lambda: STRATEGIES)
    batch: int | None = None
    sequence: int | None = None
    warmup: int = 5
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("models", "strategies", "num_gpus")


COLUMNS = [
    Column("model", "model"),
    Column("num_gpus", "GPUs"),
    Column("strategy", "strategy"),
    Column("batch", "batch/GPU"),
    Column("global_batch", "batch"),
    Column("sequence", "tokens"),
    Column("tokens_per_second", "tokens/s", 0),
    Column("efficiency", "efficiency", 3),
    Column("tflops", "TFLOPS", 0),
    Column("tflops_per_gpu", "a GPU", 1),
    Column("memory_gb", "GB/GPU", 1),
    Column("ms", "ms/step", 1),
]


def scaling(config: DictConfig) -> dict[str, Any]:
    args = ScalingConfig(**config.trainer_args)
    device = device_of(args)
    weights_dtype(config)  # refused before the first row
    with ranks.joined(device) as control:
        world = dist.get_world_size()
        notes = gpt.notes(config)
        left_out = [str(n) for n in args.num_gpus if n > world]
        if left_out:
            notes.append(f"{', '.join(left_out)} GPUs are left out: this run has {world}.")
        groups = {n: dist.new_group(list(range(n))) for n in sorted(set(args.num_gpus)) if 1 < n <= world}  # every rank makes each
        table = Table("scaling", COLUMNS, figure="tokens_per_second", notes=notes)
        return measure(config, args, table, cases(args, world), lambda case: one(case, config, args, device, control, groups))


def cases(args: ScalingConfig, world: int) -> list[Row]:
    """One GPU first, once; then the others in their order. Raises UserError where the run has too few GPUs for any."""
    found = []
    for name in args.models:
        for n in sorted(n for n in set(args.num_gpus) if n <= world):
            batch, sequence = args.batch or gpt.SIZES[name].batch, args.sequence or gpt.SIZES[name].sequence
            for strategy in args.strategies[:1] if n == 1 else args.strategies:
                found.append(
                    {"model": name, "num_gpus": n, "strategy": strategy, "batch": batch, "global_batch": n * batch, "sequence": sequence}
                )
    if not found:
        raise UserError(f"method.args.num_gpus={args.num_gpus}: this run has {world}. Use: topology.num_gpus=, or fewer.")
    return found


def one(
    case: Row,
    config: DictConfig,
    args: ScalingConfig,
    device: torch.device,
    control: dist.ProcessGroup,
    groups: dict[int, dist.ProcessGroup],
) -> Row:
    n = case["num_gpus"]
    trains = dist.get_rank() < n
    found = ranks.slowest(control, (lambda: trained(case, config, args, device, groups.get(n))) if trains else None)
    tokens_per_second = case["global_batch"] * case["sequence"] / found["ms"] * 1e3
    tflops = 6 * found["parameters"] * tokens_per_second / 1e12
    plain = tokens_per_second if n == 1 else on_one_gpu(Path(config.run_dir) / "metrics.jsonl", case)
    return {
        **found,
        "tokens_per_second": tokens_per_second,
        "efficiency": tokens_per_second / n / plain if plain else None,
        "tflops": tflops,
        "tflops_per_gpu": tflops / n,
    }


def trained(case: Row, config: DictConfig, args: ScalingConfig, device: torch.device, group: dist.ProcessGroup | None) -> dict[str, float]:
    """What this rank measures, with the others of `group`; None: alone."""
    fresh(device)
    torch.manual_seed(args.seed)  # equal weights on all: FSDP2 takes each rank's part of its own
    size = gpt.SIZES[case["model"]]
    model = gpt.build(size, case["sequence"], device, weights_dtype(config))
    parameters = gpt.parameters(model)
    torch.manual_seed(args.seed + dist.get_rank())
    batch = gpt.random_batch(size, case["batch"], case["sequence"], device)
    step = training_step(spread(model, case, device, group), batch, config)
    return {"parameters": parameters, **timed(step, device, args.warmup, args.steps)}


def spread(model: gpt.GPT, case: Row, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    if group is None:
        return model
    if case["strategy"] == "ddp":
        # Views: without them every gradient stands in memory twice.
        return DistributedDataParallel(
            model, process_group=group, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
    shard([*model.blocks, model], device, group)
    return model


def shard(modules: Sequence[nn.Module], device: torch.device, group: dist.ProcessGroup) -> None:
    """FSDP2 over a group: each module's parameters are gathered together, the outermost's last."""
    mesh = DeviceMesh.from_group(group, device.type)
    for module in modules:
        fully_shard(module, mesh=mesh)


def on_one_gpu(path: Path, case: Row) -> float | None:
    """Tokens per second of this series' row for one GPU, which an earlier start of the run may have measured. None where it has none."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found = (row.get("tokens_per_second") for row in rows if row["num_gpus"] == 1 and row["model"] == case["model"])
    return next(found, None)


if __name__ == "__main__":
    main(scaling)
