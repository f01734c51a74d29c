"""Multiply square matrices twenty times in a row: the MI350X report's first benchmark.

Unlike bench/gemm, this runs products in a loop without clearing caches and times the whole loop.
The report states neither warm-up nor values; here 5 calls and normal random values are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from recipes.bench import gemm
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, grid, measure, rate
from recipes.bench.timing import steps_ms
from recipes.rank.names import name_field
from recipes.rank.program import main


@dataclass
class MatmulConfig(SeriesConfig):
    """Hold the arguments. `sizes`: rows and columns. `dtypes` null: all that the hardware has."""

    sizes: list[int] = field(default_factory=list)
    dtypes: list[str] | None = name_field(lambda: gemm.DTYPES, None)
    warmup: int = 5
    iterations: int = 20


def matmul(config: DictConfig) -> dict[str, Any]:
    args = MatmulConfig(**config.trainer_args)
    device = device_of(args)
    shown = "size dtype total_s tflops share_of_peak"

    def work(case: Row) -> Row:
        size, dtype = case["size"], case["dtype"]
        operands = {"dtype": dtype, "op": "matmul", "values": "normal", "padding": 0}
        call = gemm.product(size, size, size, operands, device)
        ms = steps_ms(call, device, args.warmup, args.iterations)
        return {
            "total_s": ms * args.iterations / 1e3,
            **rate(2 * size**3 / ms / 1e9, config, dtype),
        }

    dtypes = args.dtypes or [dtype for dtype in gemm.DTYPES if dtype in config.hardware.peak_tflops]
    cases = grid(dtype=dtypes, size=args.sizes)
    return measure(config, args, Table("matmul", shown, figure="tflops"), cases, work)


if __name__ == "__main__":
    main(matmul)
