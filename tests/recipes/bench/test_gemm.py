"""Test the benchmark of matrix products: its cases, its operands, and what it rejects."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench import gemm
from recipes.bench.gemm import GemmConfig
from tests.conftest import composed

CPU = torch.device("cpu")


def args(**given) -> GemmConfig:
    return GemmConfig(
        **{"output_dir": "out", "shapes": [[8, 4, 16]], "warmup": 0, "repetitions": 1, **given}
    )


def one(shape: str, **changes: str) -> dict:
    case = {"shape": shape, "dtype": "fp32", "op": "matmul", "values": "zeros", "padding": 0}
    config = OmegaConf.create({"hardware": {"peak_tflops": {"fp32": 10.0}}})
    return gemm.measure_one({**case, **changes}, config, args(), CPU)


def test_every_precision_of_the_hardware_and_none_else():
    peaks = composed("hardware=mi50", "method=bench/gemm").hardware.peak_tflops
    assert {case["dtype"] for case in gemm.cases(args(), peaks)} == {"fp32", "fp16"}
    peaks = composed("hardware=mi300x", "method=bench/gemm").hardware.peak_tflops
    assert {case["dtype"] for case in gemm.cases(args(), peaks)} == {
        "fp32",
        "tf32",
        "fp16",
        "bf16",
        "fp8",
    }


def test_values_and_paddings_are_measured_for_the_first_shape_only():
    actual = gemm.cases(
        args(
            shapes=[[8, 4, 16], [4, 4, 4]],
            dtypes=["fp32"],
            values=["normal", "zeros"],
            paddings=[0, 64],
        ),
        {},
    )
    assert [(c["shape"], c["op"], c["values"], c["padding"]) for c in actual] == [
        ("8 4 16", "matmul", "normal", 0),
        ("8 4 16", "linear", "normal", 0),
        ("4 4 4", "matmul", "normal", 0),
        ("4 4 4", "linear", "normal", 0),
        ("8 4 16", "matmul", "zeros", 0),
        ("8 4 16", "linear", "normal", 64),
    ]


def test_values_and_paddings_are_those_of_a_call_that_takes_them(monkeypatch):
    monkeypatch.setattr(gemm.shutil, "which", lambda name: name)
    given = args(
        ops=["hipblaslt-bench", "linear"],
        dtypes=["bf16", "fp8"],
        values=["normal", "zeros"],
        paddings=[0, 64],
    )
    actual = [(c["dtype"], c["op"], c["values"], c["padding"]) for c in gemm.cases(given, {})]
    assert actual[-2:] == [("bf16", "linear", "zeros", 0), ("bf16", "linear", "normal", 64)]
    assert not [case for case in actual if case[0] == "fp8" and case[1] != "hipblaslt-bench"]
    monkeypatch.setattr(gemm.shutil, "which", lambda name: None)
    assert gemm.cases(args(ops=["hipblaslt-bench"]), {"fp32": 1.0}) == []


def test_fp8_is_multiplied_plain_and_compiled_and_never_by_linear():
    given = args(ops=["linear", "compiled", "matmul"], dtypes=["fp8"], values=["normal", "zeros"])
    assert [(c["op"], c["values"]) for c in gemm.cases(given, {})] == [
        ("compiled", "normal"),
        ("matmul", "normal"),
        ("compiled", "zeros"),
    ]


def test_a_product_that_torch_rejects_is_a_row(monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(gemm, "median_ms", refuse)
    with pytest.raises(UserError, match="matmul in fp32: CUBLAS_STATUS_NOT_SUPPORTED"):
        one("8 8 8")


@pytest.mark.parametrize("op", ["matmul", "linear"])
@pytest.mark.parametrize("padding", [0, 64])
def test_a_call_multiplies_m_by_k_and_k_by_n(op, padding):
    case = {"dtype": "fp32", "op": op, "values": "integers", "padding": padding}
    assert gemm.product(8, 4, 16, case, CPU)().shape == (8, 4)
    operand = gemm.matrix(8, 16, case, torch.float32, CPU)
    assert operand.shape == (8, 16)
    assert operand.stride() == (16 + padding // 4, 1)
    assert set(operand.flatten().tolist()) <= {-2, -1, 0, 1, 2}
    assert gemm.matrix(8, 16, {**case, "values": "zeros"}, torch.float32, CPU).count_nonzero() == 0
    assert gemm.matrix(
        8, 16, {**case, "values": "constant"}, torch.float32, CPU
    ).unique().tolist() == [1.0]


def test_operations_are_two_a_multiplication(monkeypatch):
    monkeypatch.setattr(gemm, "median_ms", lambda *_: 2.0)
    assert one("1000 1000 1000") == {"ms": 2.0, "tflops": 1.0, "share_of_peak": 0.1}


HIPBLASLT = """\
[0]:transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,stride_a,beta,ldb,stride_b,ldc,stride_c,ldd,stride_d,a_type,b_type,us,hipblaslt-Gflops
    N,N,0,1,8192,8192,8192,1,8192,67108864,0,8192,67108864,8192,67108864,8192,67108864,bf16_r,bf16_r,1250.5,879228
"""


def test_hipblaslt_bench_is_read_by_the_name_of_its_column():
    assert gemm.parsed_us(HIPBLASLT) == 1250.5
    with pytest.raises(UserError, match="no column"):
        gemm.parsed_us("nothing")


def test_hipblaslt_bench_is_called(monkeypatch, tmp_path):
    program = tmp_path / "hipblaslt-bench"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/requested\ncat <<'E'\n{HIPBLASLT}E\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    actual = one("8192 8192 8192", dtype="bf16", op="hipblaslt-bench")
    assert actual["ms"] == pytest.approx(1.2505)
    assert "--precision bf16_r" in (tmp_path / "requested").read_text()
    one("8192 8192 8192", dtype="fp8", op="hipblaslt-bench")
    assert "--a_type f8_r --b_type f8_r --c_type bf16_r" in (tmp_path / "requested").read_text()
    program.write_text("#!/bin/sh\necho no device >&2\nexit 1\n")
    with pytest.raises(UserError, match="no device"):
        gemm.hipblaslt_ms(8, 8, 8, "bf16", CPU, args())
