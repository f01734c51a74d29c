"""Matrix products: the shapes of a 70B model's training, by precision, by the way they are called, by values and by strides.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=bench/gemm
    A gate:  python launch/run.py hardware=mi350x method=bench/gemm method.args.dtypes=[bf16] method.args.fail_below=0.9

Method of SemiAnalysis (December 2024): 30 warm-up calls, 200 timed ones, caches cleared between, the median; normal random values. A
product of (m, k) and (k, n) counts 2 m n k operations.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure, refusals
from recipes.bench.timing import median_ms
from recipes.bench.training import check_tuples
from recipes.common.errors import UserError
from recipes.common.names import named
from recipes.common.program import main

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
OPS = ("matmul", "linear", "compiled", "hipblaslt-bench")
VALUES = ("normal", "integers", "constant", "zeros")
# What hipblaslt-bench calls them (hipblaslt-bench --help); fp8 as float8() has it, and its results in bf16.
HIPBLASLT = {"fp32": "f32_r", "fp16": "f16_r", "bf16": "bf16_r", "fp8": "f8_r"}
ROTATED_MB = 512  # of operands that its calls take in turn, so that none finds them in a cache


@dataclass
class GemmConfig(SeriesConfig):
    """`shapes`: lists of m, n, k. `dtypes` empty: all that the hardware computes in. `ops`: torch.matmul; F.linear, whose second matrix
    lies transposed; matmul under torch.compile with max-autotune; hipBLASLt's own program where it is installed. `values` and `paddings`
    (bytes a row) beyond the first are measured for the first shape only: zeros, ones (`constant`) and small integers switch fewer
    transistors and run at higher clocks; rows whose stride is a multiple of 512 bytes meet in the same cache tags on MI300 (AMD's
    workload guide, "Tagram channel hotspotting"). Raises UserError.
    """

    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] | None = named(lambda: DTYPES, None)
    ops: list[str] = named(lambda: OPS, ["matmul", "linear"])
    values: list[str] = named(lambda: VALUES, ["normal"])
    paddings: list[int] = field(default_factory=lambda: [0])
    warmup: int = 30
    repetitions: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tuples("shapes", self.shapes, "m", "n", "k")
        self.check_filled("shapes", "dtypes", "ops", "values", "paddings")
        if any(padding % 4 for padding in self.paddings):
            raise UserError(f"method.args.paddings={self.paddings}: bytes, multiples of 4.")


def gemm(config: DictConfig) -> dict[str, Any]:
    args = GemmConfig(**config.trainer_args)
    device = device_of(args)
    table = Table(
        "gemm",
        figure="tflops",
        columns=[
            Column("shape", "m n k"),
            Column("dtype", "dtype"),
            Column("op", "op"),
            Column("values", "values"),
            Column("padding", "padding B"),
            Column("ms", "ms", 3),
            Column("tflops", "TFLOPS", 1),
            Column("share_of_peak", "of peak", 2),
        ],
    )
    peaks = dict(config.hardware.peak_tflops)
    if "hipblaslt-bench" in args.ops and shutil.which("hipblaslt-bench") is None:
        table.notes.append("hipblaslt-bench is not installed here (package hipblaslt-clients of ROCm): its rows are left out.")
    return measure(config, args, table, cases(args, peaks), lambda case: one(case, args, peaks.get(case["dtype"]), device))


def cases(args: GemmConfig, peaks: dict[str, float]) -> list[Row]:
    """Every shape, precision and call; then the first shape and call of torch's with the other values and paddings. Raises UserError."""
    dtypes = args.dtypes or [dtype for dtype in DTYPES if dtype in peaks]
    ops = [op for op in args.ops if op != "hipblaslt-bench" or shutil.which(op)]
    if not ops:
        raise UserError(f"method.args.ops={args.ops}: hipblaslt-bench is not installed here, so nothing would be measured. Add matmul.")
    shapes = [" ".join(map(str, shape)) for shape in args.shapes]
    found = [
        {"shape": shape, "dtype": dtype, "op": op, "values": args.values[0], "padding": args.paddings[0]}
        for dtype, shape, op in itertools.product(dtypes, shapes, ops)
        if serves(op, dtype)
    ]
    for dtype in dtypes:
        calls = [op for op in ops if op != "hipblaslt-bench" and serves(op, dtype)]  # these take values and paddings
        if not calls:
            continue
        first = {"shape": shapes[0], "dtype": dtype, "op": calls[0], "values": args.values[0], "padding": args.paddings[0]}
        found += [{**first, "values": values} for values in args.values[1:]]
        transposed = "linear" if "linear" in calls else calls[0]  # the case that suffers most, by AMD's guide
        found += [{**first, "op": transposed, "padding": padding} for padding in args.paddings[1:]]
    return found


def serves(op: str, dtype: str) -> bool:
    """Whether there is such a product: F.linear takes no fp8."""
    return dtype in HIPBLASLT if op == "hipblaslt-bench" else (op, dtype) != ("linear", "fp8")


def one(case: Row, args: GemmConfig, peak: float | None, device: torch.device) -> Row:
    m, n, k = map(int, case["shape"].split())
    if case["op"] == "hipblaslt-bench":
        ms = hipblaslt_ms(m, n, k, case["dtype"], device, args)
    else:
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = case["dtype"] == "tf32"
        with refusals(f"{case['op']} in {case['dtype']}"):
            ms = median_ms(product(m, n, k, case, device), device, args.warmup, args.repetitions)
    tflops = 2 * m * n * k / ms / 1e9
    return {"ms": ms, "tflops": tflops, "share_of_peak": tflops / peak if peak else None}


def product(m: int, n: int, k: int, case: Row, device: torch.device) -> Callable[[], torch.Tensor]:
    """The call: (m, k) by (k, n)."""
    dtype = float8(device) if case["dtype"] == "fp8" else DTYPES[case["dtype"]]
    a = matrix(m, k, case, dtype, device)
    if case["dtype"] == "fp8":
        one_, b = torch.ones((), device=device), matrix(n, k, case, dtype, device).t()  # its kernels take the second one transposed
        scaled = functools.partial(torch._scaled_mm, scale_a=one_, scale_b=one_, out_dtype=torch.bfloat16, use_fast_accum=True)
        multiply = compiled(scaled) if case["op"] == "compiled" else scaled
        return lambda: multiply(a, b)
    if case["op"] == "linear":
        weight = matrix(n, k, case, dtype, device)
        return lambda: F.linear(a, weight)
    b = matrix(k, n, case, dtype, device)
    multiply = compiled(torch.matmul) if case["op"] == "compiled" else torch.matmul
    return lambda: multiply(a, b)


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()  # it compiles a function for eight shapes, and then no more
    found: Callable[..., torch.Tensor] = torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
    return found


def matrix(rows: int, columns: int, case: Row, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(rows, columns), each row followed by the padding."""
    padding = int(case["padding"]) // dtype.itemsize
    shape = (rows, columns + padding)
    if case["values"] == "zeros":
        whole = torch.zeros(shape, device=device)
    elif case["values"] == "constant":
        whole = torch.ones(shape, device=device)
    elif case["values"] == "integers":
        whole = torch.randint(-2, 3, shape, device=device).float()
    else:
        whole = torch.randn(shape, device=device)
    return whole.to(dtype)[:, :columns]


def float8(device: torch.device) -> torch.dtype:
    """gfx942 has a format of its own, in which negative zero is NaN; all others have OCP's."""
    arch = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "") if device.type == "cuda" else ""
    return torch.float8_e4m3fnuz if arch.startswith("gfx942") else torch.float8_e4m3fn


def hipblaslt_ms(m: int, n: int, k: int, dtype: str, device: torch.device, args: GemmConfig) -> float:
    """What hipBLASLt's own program measures, with its own random values (`hpl`: uniform; normal ones only newer versions draw).

    It prints a table of comma-separated values, microseconds in the column `us`. Raises UserError with its words.
    """
    argv = ["hipblaslt-bench", "-m", str(m), "-n", str(n), "-k", str(k), "--rotating", str(ROTATED_MB)]
    argv += ["--iters", str(args.repetitions), "--cold_iters", str(args.warmup)]
    if dtype == "fp8":
        operand = "f8_fnuz_r" if float8(device) == torch.float8_e4m3fnuz else HIPBLASLT[dtype]
        argv += ["--a_type", operand, "--b_type", operand, "--c_type", "bf16_r", "--d_type", "bf16_r", "--compute_type", "f32_r"]
    else:
        argv += ["--precision", HIPBLASLT[dtype]]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"hipblaslt-bench: {' '.join((done.stderr or done.stdout).strip().splitlines()[-1:]) or 'it said nothing'}")
    return parsed_us(done.stdout) / 1e3


def parsed_us(text: str) -> float:
    """Raises UserError where the table is not there."""
    lines = [line.strip() for line in text.splitlines()]
    for head, values in itertools.pairwise(lines):
        names = [re.sub(r"^\[\d+\]:", "", name) for name in head.split(",")]
        if "us" in names:
            return float(values.split(",")[names.index("us")])
    raise UserError("hipblaslt-bench printed no column `us`.")


if __name__ == "__main__":
    main(gemm)
