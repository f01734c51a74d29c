"""Settings of RCCL (NCCL) that all-reduce fastest on this machine: an Optuna search over environment variables.

Started by the launcher, on two or more GPUs of a node:

    8 GPUs:  python launch/run.py hardware=mi350x method=tune/rccl
    4 GPUs:  python launch/run.py hardware=mi350x method=tune/rccl topology.num_gpus=4 method.args.num_trials=12

A trial is what method=bench/collectives measures, in processes of its own (NCCL reads its variables once). Its figure is the geometric
mean of the bus bandwidths over the sizes.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from recipes.bench import collectives
from recipes.bench.series import Column, Row, Table, device_of
from recipes.common.errors import UserError
from recipes.common.program import Interrupted, is_main_rank, main, stop_asked
from recipes.tune.search import Point, Report, SearchConfig, search, set_only
from recipes.tune.trial import Setting
from recipes.tune.tuning import finish

VARIABLES = ("NCCL_", "RCCL_", "HSA_", "HIP_", "GPU_", "ROC_", "TORCH_NCCL_")


@dataclass
class RcclConfig(SearchConfig):
    """`space`: values of environment variables."""

    recipe: str = "bench/collectives"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe != "bench/collectives":
            raise UserError(f"method.args.recipe={self.recipe}: tune/rccl measures bench/collectives. Leave it out.")
        for name in self.space:
            if not name.startswith(VARIABLES):  # no library would read it, and the best of equal trials would be called a gain
                raise UserError(f"method.args.space.{name}: no variable of RCCL or of what is below it: {', '.join(VARIABLES)}...")
        # A value that is set already would be measured as another setting than the run's own.
        set_here = {name: [one for one in values if str(one) == os.environ.get(name)] for name, values in self.space.items()}
        self.space = {name: [one for one in values if one not in set_here[name]] for name, values in self.space.items()}
        self.space = {name: values for name, values in self.space.items() if values}
        if not self.space:
            raise UserError("method.args.space: every value is set in this run already, so nothing would be searched.")


def rccl(config: DictConfig) -> dict[str, Any]:
    args = RcclConfig(**OmegaConf.to_container(config.trainer_args))
    measured = collectives.CollectivesConfig(**OmegaConf.to_container(config.tuned.trainer_args))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        raise UserError("tune/rccl with one rank: nothing would be communicated. Use: topology.num_gpus=2 or more.")
    device_of(measured)
    dist.init_process_group("gloo")
    workers = collectives.Workers(measured, [world], {})
    try:
        if not is_main_rank():
            return follow(config, measured, workers)
        table = Table(
            "rccl",
            figure="bus_gb_s",
            columns=[Column("trial", "trial"), Column("setting", "setting"), Column("bus_gb_s", "bus GB/s", 2)],
            notes=[f"{world} ranks, {', '.join(measured.ops)} of {', '.join(map(str, measured.sizes))} bytes."],
        )
        dtype = (measured.dtypes or [next(name for name in config.hardware.precisions if name in collectives.DTYPES)])[0]
        cases = [
            {"op": op, "ranks": world, "bytes": size, "dtype": dtype, "program": "torch"} for op in measured.ops for size in measured.sizes
        ]
        rows = search(config, args, table, lambda number, point, report: one(cases, number, point, report, config, measured, workers))
        settings = [Setting(env={name: str(value) for name, value in set_only(row["point"]).items()}) for row in rows]
        return finish(config, table, rows, rows[0], settings)
    finally:
        tell(None)
        workers.close()


def one(
    cases: list[Row],
    number: int,
    point: Point,
    report: Report,
    config: DictConfig,
    args: collectives.CollectivesConfig,
    workers: collectives.Workers,
) -> Row:
    """Every case under one setting. Raises UserError, Pruned and Interrupted."""
    found: Row = {}
    for case in cases:
        if stop_asked():
            raise Interrupted()
        asked = {**case, "setting": str(number)}
        tell((asked, {name: str(value) for name, value in point.items()}))
        figure = measure(asked, point, config, args, workers)["bus_gb_s"]
        found[f"{case['op']} {case['bytes']}"] = figure
        report(figure)
    return {"bus_gb_s": statistics.geometric_mean(found.values()), "bus_gb_s_by_size": found}


def measure(asked: Row, point: Point, config: DictConfig, args: collectives.CollectivesConfig, workers: collectives.Workers) -> Row:
    """On every rank alike. Raises UserError on all of them."""
    workers.settings.setdefault(asked["setting"], {name: str(value) for name, value in point.items()})
    return collectives.one(asked, args, config, workers)


def tell(message: tuple[Row, Point] | None) -> None:
    """From the main rank to those that follow; None: it is over."""
    if is_main_rank():
        dist.broadcast_object_list([message], src=0)


def follow(config: DictConfig, args: collectives.CollectivesConfig, workers: collectives.Workers) -> dict[str, Any]:
    """The other ranks: measure what the main one says, until it says that it is over."""
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0)
        if told[0] is None:
            return {}
        try:
            measure(*told[0], config, args, workers)
        except UserError:  # the main rank has it too, and notes it
            continue


if __name__ == "__main__":
    main(rccl)
