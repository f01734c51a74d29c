"""Test the benchmark of matrix products: its cases, its operands, and hipblaslt-bench."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench import gemm
from recipes.bench.gemm import GemmConfig

CPU = torch.device("cpu")


def args(**changes) -> GemmConfig:
    small = {"output_dir": "out", "shapes": [[8, 4, 16]], "warmup": 0, "repetitions": 1}
    return GemmConfig(**{**small, **changes})


def measure(shape: str, **changes: str) -> dict:
    case = {"shape": shape, "dtype": "fp32", "op": "matmul", "values": "zeros", "padding": 0}
    config = OmegaConf.create({"hardware": {"peak_tflops": {"fp32": 10.0}}})
    return gemm.measure_one({**case, **changes}, config, args(), CPU)


def test_other_values_and_paddings_are_measured_for_one_shape_and_call(monkeypatch):
    monkeypatch.setattr(gemm.shutil, "which", lambda name: name)
    variants = {"values": ["normal", "zeros"], "paddings": [0, 64]}
    shapes = [[8, 4, 16], [4, 4, 4]]
    cases = gemm.cases(args(shapes=shapes, dtypes=["fp32"], **variants), {})
    assert [(c["shape"], c["op"], c["values"], c["padding"]) for c in cases] == [
        ("8 4 16", "matmul", "normal", 0),
        ("8 4 16", "linear", "normal", 0),
        ("4 4 4", "matmul", "normal", 0),
        ("4 4 4", "linear", "normal", 0),
        ("8 4 16", "matmul", "zeros", 0),
        ("8 4 16", "linear", "normal", 64),
    ]
    ops = ["hipblaslt-bench", "linear"]
    cases = gemm.cases(args(ops=ops, dtypes=["bf16", "fp8"], **variants), {})
    calls = [(c["dtype"], c["op"], c["values"], c["padding"]) for c in cases]
    assert calls[-2:] == [("bf16", "linear", "zeros", 0), ("bf16", "linear", "normal", 64)]
    assert {op for dtype, op, *_ in calls if dtype == "fp8"} == {"hipblaslt-bench"}
    monkeypatch.setattr(gemm.shutil, "which", lambda name: None)
    assert gemm.cases(args(ops=["hipblaslt-bench"]), {"fp32": 1.0}) == []


@pytest.mark.parametrize("op", ["matmul", "linear"])
@pytest.mark.parametrize("padding", [0, 64])
def test_a_call_multiplies_m_by_k_and_k_by_n(op, padding):
    case = {"dtype": "fp32", "op": op, "values": "integers", "padding": padding}
    assert gemm.product(8, 4, 16, case, CPU)().shape == (8, 4)
    operand = gemm.matrix(8, 16, case, torch.float32, CPU)
    assert operand.shape == (8, 16)
    assert operand.stride() == (16 + padding // 4, 1)
    assert set(operand.flatten().tolist()) <= {-2, -1, 0, 1, 2}


def test_a_multiplication_counts_two_operations(monkeypatch):
    monkeypatch.setattr(gemm, "median_ms", lambda *_: 2.0)
    assert measure("1000 1000 1000") == {"ms": 2.0, "tflops": 1.0, "share_of_peak": 0.1}


HIPBLASLT = """\
[0]:transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,stride_a,beta,ldb,stride_b,ldc,stride_c,ldd,stride_d,a_type,b_type,us,hipblaslt-Gflops
    N,N,0,1,8192,8192,8192,1,8192,67108864,0,8192,67108864,8192,67108864,8192,67108864,bf16_r,bf16_r,1250.5,879228
"""


def test_hipblaslt_bench(monkeypatch, tmp_path):
    program, argv = tmp_path / "hipblaslt-bench", tmp_path / "argv"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {argv}\ncat <<'E'\n{HIPBLASLT}E\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    row = measure("8192 8192 8192", dtype="bf16", op="hipblaslt-bench")
    assert row["ms"] == pytest.approx(1.2505)
    assert "--precision bf16_r" in argv.read_text()
    measure("8192 8192 8192", dtype="fp8", op="hipblaslt-bench")
    assert "--a_type f8_r --b_type f8_r --c_type bf16_r" in argv.read_text()
    program.write_text("#!/bin/sh\necho no device >&2\nexit 1\n")
    with pytest.raises(UserError, match="no device"):
        gemm.hipblaslt_ms(8, 8, 8, "bf16", CPU, args())
