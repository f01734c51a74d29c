"""The benchmark of matrix products: its cases, its operands, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from recipes.bench import gemm
from recipes.bench.gemm import GemmConfig
from recipes.common.errors import UserError
from tests.conftest import composed

CPU = torch.device("cpu")


def args(**given) -> GemmConfig:
    return GemmConfig(**{"output_dir": "out", "shapes": [[8, 4, 16]], "warmup": 0, "repetitions": 1, **given})


def test_every_precision_of_the_hardware_and_none_else():
    peaks = composed("hardware=mi50", "method=bench/gemm").hardware.peak_tflops
    assert {case["dtype"] for case in gemm.cases(args(), peaks)} == {"fp32", "fp16"}
    peaks = composed("hardware=mi300x", "method=bench/gemm").hardware.peak_tflops
    assert {case["dtype"] for case in gemm.cases(args(), peaks)} == {"fp32", "tf32", "fp16", "bf16", "fp8"}


def test_values_and_paddings_are_measured_for_the_first_shape_only():
    found = gemm.cases(args(shapes=[[8, 4, 16], [4, 4, 4]], dtypes=["fp32"], values=["normal", "zeros"], paddings=[0, 64]), {})
    assert [(c["shape"], c["op"], c["values"], c["padding"]) for c in found] == [
        ("8 4 16", "matmul", "normal", 0),
        ("8 4 16", "linear", "normal", 0),
        ("4 4 4", "matmul", "normal", 0),
        ("4 4 4", "linear", "normal", 0),
        ("8 4 16", "matmul", "zeros", 0),
        ("8 4 16", "linear", "normal", 64),
    ]


def test_values_and_paddings_are_those_of_a_call_that_takes_them(monkeypatch):
    monkeypatch.setattr(gemm.shutil, "which", lambda name: name)
    given = args(ops=["hipblaslt-bench", "linear"], dtypes=["bf16", "fp8"], values=["normal", "zeros"], paddings=[0, 64])
    found = [(c["dtype"], c["op"], c["values"], c["padding"]) for c in gemm.cases(given, {})]
    assert found[-2:] == [("bf16", "linear", "zeros", 0), ("bf16", "linear", "normal", 64)]
    assert not [case for case in found if case[0] == "fp8" and case[1] != "hipblaslt-bench"]
    monkeypatch.setattr(gemm.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="nothing would be measured"):
        gemm.cases(args(ops=["hipblaslt-bench"]), {"fp32": 1.0})


def test_fp8_is_multiplied_plain_and_compiled_and_never_by_linear():
    given = args(ops=["linear", "compiled", "matmul"], dtypes=["fp8"], values=["normal", "zeros"])
    assert [(c["op"], c["values"]) for c in gemm.cases(given, {})] == [("compiled", "normal"), ("matmul", "normal"), ("compiled", "zeros")]


def test_a_product_that_torch_refuses_is_a_row(monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(gemm, "median_ms", refuse)
    with pytest.raises(UserError, match="matmul in fp32: CUBLAS_STATUS_NOT_SUPPORTED"):
        gemm.one({"shape": "8 8 8", "dtype": "fp32", "op": "matmul", "values": "zeros", "padding": 0}, args(), None, CPU)


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
    assert gemm.matrix(8, 16, {**case, "values": "constant"}, torch.float32, CPU).unique().tolist() == [1.0]


def test_operations_are_two_a_multiplication(monkeypatch):
    monkeypatch.setattr(gemm, "median_ms", lambda *_: 2.0)
    found = gemm.one({"shape": "1000 1000 1000", "dtype": "fp32", "op": "matmul", "values": "zeros", "padding": 0}, args(), 10.0, CPU)
    assert found == {"ms": 2.0, "tflops": 1.0, "share_of_peak": 0.1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shapes": [[8, 4]]}, r"\[8, 4\]: a list of \[m, n, k\]"),
        ({"shapes": [8, 4, 16]}, r"shapes: 8: a list of \[m, n, k\]"),
        ({"shapes": [["8", 4, 16]]}, r"a list of \[m, n, k\]"),
        ({"shapes": []}, "nothing would be measured"),
        ({"dtypes": []}, "nothing would be measured"),
        ({"repetitions": 0}, "repetitions=0: at least 1"),
        ({"dtypes": ["bf61"]}, "dtypes=bf61.*bf16"),
        ({"ops": ["matmull"]}, "ops=matmull.*matmul"),
        ({"values": ["ones"]}, "values=ones"),
        ({"paddings": [3]}, "multiples of 4"),
    ],
)
def test_refused(given, words):
    with pytest.raises(UserError, match=words):
        args(**given)


HIPBLASLT = """\
[0]:transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,stride_a,beta,ldb,stride_b,ldc,stride_c,ldd,stride_d,a_type,b_type,us,hipblaslt-Gflops
    N,N,0,1,8192,8192,8192,1,8192,67108864,0,8192,67108864,8192,67108864,8192,67108864,bf16_r,bf16_r,1250.5,879228
"""


def test_hipblaslt_bench_is_read_by_the_name_of_its_column():
    assert gemm.parsed_us(HIPBLASLT) == 1250.5
    with pytest.raises(UserError, match="no column"):
        gemm.parsed_us("nothing")


def test_a_real_program_of_that_name_is_asked(monkeypatch, tmp_path):
    program = tmp_path / "hipblaslt-bench"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\ncat <<'E'\n{HIPBLASLT}E\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = gemm.one({"shape": "8192 8192 8192", "dtype": "bf16", "op": "hipblaslt-bench"}, args(), None, CPU)
    assert found["ms"] == pytest.approx(1.2505)
    assert "--precision bf16_r" in (tmp_path / "asked").read_text()
    gemm.one({"shape": "8192 8192 8192", "dtype": "fp8", "op": "hipblaslt-bench"}, args(), None, CPU)
    assert "--a_type f8_r --b_type f8_r --c_type bf16_r" in (tmp_path / "asked").read_text()
    program.write_text("#!/bin/sh\necho no device >&2\nexit 1\n")
    with pytest.raises(UserError, match="no device"):
        gemm.hipblaslt_ms(8, 8, 8, "bf16", CPU, args())
