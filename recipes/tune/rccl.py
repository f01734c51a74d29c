"""Search environment variables of RCCL (NCCL) for the fastest all-reduce here, with Optuna.

A trial runs method=bench/collectives in new processes, because NCCL reads its variables once. Its
figure is the geometric mean of the bus bandwidths over the sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from recipes.bench import collectives
from recipes.bench.series import Column, Row, Table, device_of
from recipes.rank.names import named
from recipes.rank.program import Interrupted, is_main_rank, main, stop_asked
from recipes.tune.search import Point, Report, SearchConfig, search, set_only
from recipes.tune.trial import Setting
from recipes.tune.tuning import finish


@dataclass
class RcclConfig(SearchConfig):
    """Hold the arguments. `space` maps environment variables to values."""

    # Libraries read no other variables, so the best of equal trials would seem a gain.
    prefixes = ("NCCL_", "RCCL_", "HSA_", "HIP_", "GPU_", "ROC_", "TORCH_NCCL_")

    recipe: str = named(lambda: ("bench/collectives",), "bench/collectives")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Omit values that are already set, which would repeat the first trial.
        space = {
            name: [value for value in values if str(value) != os.environ.get(name)]
            for name, values in self.space.items()
        }
        self.space = {name: values for name, values in space.items() if values}


def rccl(config: DictConfig) -> dict[str, Any]:
    args = RcclConfig(**OmegaConf.to_container(config.trainer_args))
    bench_args = collectives.CollectivesConfig(**OmegaConf.to_container(config.tuned.trainer_args))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device_of(bench_args)
    dist.init_process_group("gloo")
    workers = collectives.Workers(bench_args, [world], {})

    def measure(case: Row, env: dict[str, str]) -> Row:
        """Return a case's figures; every rank must call this. Raise UserError on all of them."""
        workers.settings.setdefault(case["setting"], env)
        return collectives.measure_one(case, bench_args, config, workers)

    def measure_point(number: int, point: Point, report: Report) -> Row:
        """Return figures of all cases under one setting. Raise UserError, Pruned, Interrupted."""
        figures: Row = {}
        for op, size in itertools.product(bench_args.ops, bench_args.sizes):
            if stop_asked():
                raise Interrupted()
            case = {"op": op, "ranks": world, "bytes": size, "dtype": dtype, "program": "torch"}
            message = ({**case, "setting": str(number)}, env_of(point))
            send(message)
            figure = measure(*message)["bus_gb_s"]
            figures[f"{op} {size}"] = figure
            report(figure)
        mean = statistics.geometric_mean(figures.values())
        return {"bus_gb_s": mean, "bus_gb_s_by_size": figures}

    try:
        if not is_main_rank():
            return follow(measure)
        columns = [Column("trial", "trial"), Column("setting", "setting")]
        columns.append(Column("bus_gb_s", "bus GB/s", 2))
        sizes = ", ".join(map(str, bench_args.sizes))
        notes = [f"{world} ranks, {', '.join(bench_args.ops)} of {sizes} bytes."]
        table = Table("rccl", figure="bus_gb_s", columns=columns, notes=notes)
        dtypes = [name for name in config.hardware.precisions if name in collectives.DTYPES]
        dtype = (bench_args.dtypes or dtypes)[0]
        rows = search(config, args, table, measure_point)
        settings = [Setting(env=env_of(set_only(row["point"]))) for row in rows]
        return finish(config, table, rows, rows[0], settings)
    finally:
        send(None)
        workers.close()


def env_of(point: Point) -> dict[str, str]:
    return {name: str(value) for name, value in point.items()}


def send(message: tuple[Row, dict[str, str]] | None) -> None:
    """Send a case from the main rank to the others; None ends them."""
    if is_main_rank():
        dist.broadcast_object_list([message], src=0)


def follow(measure: Callable[[Row, dict[str, str]], Row]) -> dict[str, Any]:
    """Measure the main rank's cases on the other ranks until it sends None, and return {}."""
    while True:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0)
        if message[0] is None:
            return {}
        with contextlib.suppress(UserError):  # also raised on the main rank, which records it
            measure(*message[0])


if __name__ == "__main__":
    main(rccl)
