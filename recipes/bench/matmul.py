"""Multiply square matrices twenty times in a row: the MI350X report's first benchmark.

Unlike bench/gemm, this times a complete loop of products without clearing caches. The report does
not state the warm-up or the values. We use 5 warm-up calls and normal random values.
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
    """Arguments. `sizes`: numbers of rows and columns. `dtypes` null: all that the GPU supports."""

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
