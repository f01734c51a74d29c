"""Square matrix products, twenty in a row: the MI350X report's first benchmark.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=bench/matmul
    A gate:  python launch/run.py hardware=mi350x method=bench/matmul method.args.fail_below=0.9

Unlike bench/gemm the products follow one another as in a loop, with caches as they leave them, and the time is that of all of them. The
report does not state its warm-up or its values; here 5 calls, and normal random ones.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig

from recipes.bench import gemm
from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure, refusals
from recipes.bench.timing import steps_ms
from recipes.bench.training import fresh
from recipes.common.names import named
from recipes.common.program import main


@dataclass
class MatmulConfig(SeriesConfig):
    """`sizes`: rows and columns. `dtypes` empty: all that the hardware computes in. Raises UserError."""

    sizes: list[int] = field(default_factory=list)
    dtypes: list[str] | None = named(lambda: gemm.DTYPES, None)
    warmup: int = 5
    iterations: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("sizes", "dtypes")


def matmul(config: DictConfig) -> dict[str, Any]:
    args = MatmulConfig(**config.trainer_args)
    device = device_of(args)
    columns = [
        Column("size", "size"),
        Column("dtype", "dtype"),
        Column("total_s", f"s of {args.iterations}", 4),
        Column("tflops", "TFLOPS", 1),
        Column("share_of_peak", "of peak", 2),
    ]
    peaks = dict(config.hardware.peak_tflops)
    dtypes = args.dtypes or [dtype for dtype in gemm.DTYPES if dtype in peaks]
    cases = [{"size": size, "dtype": dtype} for dtype, size in itertools.product(dtypes, args.sizes)]
    table = Table("matmul", columns, figure="tflops")
    return measure(config, args, table, cases, lambda case: one(case, args, peaks.get(case["dtype"]), device))


def one(case: Row, args: MatmulConfig, peak: float | None, device: torch.device) -> Row:
    fresh(device)
    torch.manual_seed(args.seed)
    size = case["size"]
    torch.backends.cuda.matmul.allow_tf32 = case["dtype"] == "tf32"
    with refusals(case["dtype"]):
        call = gemm.product(size, size, size, {**case, "op": "matmul", "values": "normal", "padding": 0}, device)
        ms = steps_ms(call, device, args.warmup, args.iterations)
    tflops = 2 * size**3 / ms / 1e9
    return {"total_s": ms * args.iterations / 1e3, "tflops": tflops, "share_of_peak": tflops / peak if peak else None}


if __name__ == "__main__":
    main(matmul)
