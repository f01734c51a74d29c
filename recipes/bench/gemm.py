"""Time the matrix products of a 70B model's training, by precision, call, values and strides.

As in SemiAnalysis' measurements (December 2024), a figure is the median of 200 calls after 30
warm-up calls. Caches are cleared between calls, and values are normal and random. A product of
(m, k) and (k, n) counts as 2 m n k operations.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from recipes.bench.benchmark import (
    Row,
    SeriesConfig,
    Table,
    device_of,
    grid,
    measure,
    parse_output,
    rate,
)
from recipes.bench.timing import median_ms
from recipes.rank.names import name_field
from recipes.rank.program import main

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
OPS = ("matmul", "linear", "compiled", "hipblaslt-bench")
VALUES: dict[str, Callable[..., torch.Tensor]] = {
    "normal": torch.randn,
    "integers": functools.partial(torch.randint, -2, 3),
    "constant": torch.ones,
    "zeros": torch.zeros,
}
# Names of dtypes in hipblaslt-bench --help.
HIPBLASLT = {"fp32": "f32_r", "fp16": "f16_r", "bf16": "bf16_r", "fp8": "f8_r"}
ROTATED_MB = 512  # hipblaslt-bench's calls take turns on this much memory, so that caches miss


@dataclass
class GemmConfig(SeriesConfig):
    """Arguments. `shapes`: lists [m, n, k]. `dtypes` null: all that the hardware supports.

    `ops`: `matmul` is torch.matmul; `linear` is F.linear, whose second matrix is transposed;
    `compiled` is matmul under torch.compile with max-autotune; `hipblaslt-bench` is hipBLASLt's
    benchmark program, if installed.

    Only the first of `values` and `paddings` is measured for every shape; the others are measured
    for the first shape. Zeros, ones (`constant`) and small integers switch fewer transistors, so
    they run at higher clocks. A padding is in bytes per row, rounded down to complete elements. On
    MI300, rows whose stride is a multiple of 512 bytes share cache tags (AMD's workload guide,
    "Tagram channel hotspotting").
    """

    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] | None = name_field(lambda: DTYPES, None)
    ops: list[str] = name_field(lambda: OPS, ["matmul", "linear"])
    values: list[str] = name_field(lambda: VALUES, ["normal"])
    paddings: list[int] = field(default_factory=lambda: [0])
    warmup: int = 30
    repetitions: int = 200


COLUMNS = "shape dtype op values padding ms tflops share_of_peak"


def gemm(config: DictConfig) -> dict[str, Any]:
    args = GemmConfig(**config.trainer_args)
    device = device_of(args)
    table = Table("gemm", COLUMNS, figure="tflops")
    if "hipblaslt-bench" in args.ops and shutil.which("hipblaslt-bench") is None:
        table.notes.append(
            "hipblaslt-bench is left out. To measure it, install ROCm's package hipblaslt-clients."
        )
    rows = cases(args, config.hardware.peak_tflops)
    return measure(config, args, table, rows, lambda case: measure_one(case, config, args, device))


def cases(args: GemmConfig, peaks: DictConfig | dict[str, float]) -> list[Row]:
    """Return a case for each precision, shape and call, then cases of other values and paddings.

    Other values and paddings only have cases for the first shape and one of torch's calls.
    """
    ops = [op for op in args.ops if op != "hipblaslt-bench" or shutil.which(op)]
    dtypes = args.dtypes or [dtype for dtype in DTYPES if dtype in peaks]
    shapes = [" ".join(map(str, shape)) for shape in args.shapes]
    rows = [
        {**case, "values": args.values[0], "padding": args.paddings[0]}
        for case in grid(dtype=dtypes, shape=shapes, op=ops)
        if supports(case["op"], case["dtype"])
    ]
    for dtype in dtypes:
        # hipblaslt-bench has no options for values or paddings.
        calls = [row for row in rows if row["dtype"] == dtype and row["op"] != "hipblaslt-bench"]
        if not calls:
            continue
        rows += [{**calls[0], "values": values} for values in args.values[1:]]
        # According to AMD's guide, bad strides slow down F.linear most.
        linear = next((row for row in calls if row["op"] == "linear"), calls[0])
        rows += [{**linear, "padding": padding} for padding in args.paddings[1:]]
    return rows


def supports(op: str, dtype: str) -> bool:
    """Return whether the call supports the dtype; F.linear does not support fp8."""
    return dtype in HIPBLASLT if op == "hipblaslt-bench" else (op, dtype) != ("linear", "fp8")


def measure_one(case: Row, config: DictConfig, args: GemmConfig, device: torch.device) -> Row:
    m, n, k = map(int, case["shape"].split())
    if case["op"] == "hipblaslt-bench":
        ms = hipblaslt_ms(m, n, k, case["dtype"], device, args)
    else:
        ms = median_ms(product(m, n, k, case, device), device, args.warmup, args.repetitions)
    return {"ms": ms, **rate(2 * m * n * k / ms / 1e9, config, case["dtype"])}


def product(m: int, n: int, k: int, case: Row, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies (m, k) by (k, n)."""
    torch.backends.cuda.matmul.allow_tf32 = case["dtype"] == "tf32"
    dtype = float8(device) if case["dtype"] == "fp8" else DTYPES[case["dtype"]]
    a = matrix(m, k, case, dtype, device)
    multiply: Callable[..., torch.Tensor] = torch.matmul
    if case["dtype"] == "fp8":
        scale = torch.ones((), device=device)
        b = matrix(n, k, case, dtype, device).t()  # the layout that the kernels require
        options = {"scale_a": scale, "scale_b": scale, "out_dtype": torch.bfloat16}
        multiply = functools.partial(torch._scaled_mm, **options, use_fast_accum=True)
    elif case["op"] == "linear":
        multiply, b = F.linear, matrix(n, k, case, dtype, device)
    else:
        b = matrix(k, n, case, dtype, device)
    if case["op"] == "compiled":
        multiply = torch.compile(multiply, mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda: multiply(a, b)


def matrix(
    rows: int, columns: int, case: Row, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a matrix (rows, columns) with the case's padding after each row in memory."""
    shape = (rows, columns + int(case["padding"]) // dtype.itemsize)
    return VALUES[case["values"]](shape, device=device).float().to(dtype)[:, :columns]


def float8(device: torch.device) -> torch.dtype:
    """Return the fp8 dtype that the device computes in: fnuz on gfx942, otherwise OCP."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    gfx942 = getattr(properties, "gcnArchName", "").startswith("gfx942")
    return torch.float8_e4m3fnuz if gfx942 else torch.float8_e4m3fn


def hipblaslt_ms(
    m: int, n: int, k: int, dtype: str, device: torch.device, args: GemmConfig
) -> float:
    """Return the milliseconds that hipblaslt-bench measures. Raise UserError if it fails.

    hipblaslt-bench draws uniform random values (`hpl`), because older versions have no normal ones.
    Results of fp8 products are bf16, as in `product`.
    """
    types = f"--precision {HIPBLASLT[dtype]}"
    if dtype == "fp8":
        operand = "f8_fnuz_r" if float8(device) == torch.float8_e4m3fnuz else HIPBLASLT[dtype]
        types = f"--a_type {operand} --b_type {operand} --c_type bf16_r --d_type bf16_r"
        types += " --compute_type f32_r"
    options = f"-m {m} -n {n} -k {k} --rotating {ROTATED_MB} {types}"
    counts = f"--iters {args.repetitions} --cold_iters {args.warmup}"
    return parse_output(f"hipblaslt-bench {options} {counts}".split(), microseconds) / 1e3


def microseconds(text: str) -> float | None:
    """Return the value in column `us` of hipblaslt-bench's comma-separated table, or None."""
    for head, values in itertools.pairwise(text.splitlines()):
        names = [re.sub(r"^\[\d+\]:", "", name) for name in head.strip().split(",")]
        if "us" in names:
            return float(values.split(",")[names.index("us")])
    return None


if __name__ == "__main__":
    main(gemm)
