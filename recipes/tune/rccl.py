"""Search with Optuna for RCCL's (NCCL's) environment variables with the fastest all-reduce.

A trial is a run of method=bench/collectives. Its figure is the geometric mean of the bus bandwidths
of all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench.benchmark import Table
from recipes.bench.collective_variables import check_variables
from recipes.bench.collectives import CollectivesConfig
from recipes.rank.device import DTYPES
from recipes.rank.names import name_field
from recipes.rank.program import is_main_rank, main
from recipes.rank.ranks import num_ranks
from recipes.tune.search import Point, SearchConfig, search_bench
from recipes.tune.trial import Setting


@dataclass
class RcclConfig(SearchConfig):
    """Arguments. `space` maps environment variables to values."""

    recipe: str = name_field(lambda: ("bench/collectives",), "bench/collectives")
    # Other variables would only add noise, because the libraries do not read them.
    space: dict[str, list[Any]] = field(
        default_factory=dict,
        metadata={"prefixes": ["NCCL_", "RCCL_", "HSA_", "HIP_", "GPU_", "ROC_", "TORCH_NCCL_"]},
    )


def rccl(config: DictConfig) -> dict[str, Any]:
    args = RcclConfig(**OmegaConf.to_container(config.trainer_args))
    if not is_main_rank():  # the trials start their own ranks on the same GPUs
        return {}
    check_variables(args.space, "method.args.space")
    bench = CollectivesConfig(**OmegaConf.to_container(config.tuned.trainer_args))
    dtype = next(name for name in bench.dtypes or config.hardware.precisions if name in DTYPES)
    sizes = ", ".join(map(str, bench.sizes))
    notes = [f"Measured {', '.join(bench.ops)} of {sizes} bytes on {num_ranks()} ranks."]
    table = Table("rccl", "trial setting bus_gb_s", figure="bus_gb_s", notes=notes)
    only = {"ranks": [num_ranks()], "dtypes": [dtype], "programs": ["torch"], "settings": []}

    def setting_of(point: Point) -> Setting:
        return Setting(env={name: str(value) for name, value in point.items()})

    name_of = lambda row: f"{row['op']} {row['bytes']}"  # noqa: E731
    return search_bench(config, args, table, setting_of, "size", name_of, only)[0]


if __name__ == "__main__":
    main(rccl)
