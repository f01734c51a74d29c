"""Run a benchmark of three rows twice. In the second row, rank 1 runs out of memory.

The other rank waits for it in an all-reduce. Print the exit codes.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from recipes.bench import consensus
from recipes.bench.benchmark import Row, SeriesConfig, Table, measure
from recipes.rank.program import run
from tests.e2e import forked

consensus.GRACE = timedelta(seconds=1)


def bench(config: DictConfig) -> dict[str, Any]:
    with consensus.control_group(torch.device("cpu")) as control:
        table = Table("gemm", "shape sum", figure="sum")

        def work(case: Row) -> dict[str, float]:
            if case["shape"] == "second" and dist.get_rank() == 1:
                raise torch.OutOfMemoryError
            one = torch.ones(())
            dist.all_reduce(one)
            return {"sum": float(one)}

        cases = [{"shape": name} for name in ("first", "second", "third")]
        return measure(
            config,
            SeriesConfig("out", use_cpu=True),
            table,
            cases,
            lambda case: consensus.slowest_rank(control, lambda: work(case)),
        )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    print([forked.run(lambda: run(bench, arguments), arguments) for _ in range(2)])
