"""Test attention's arithmetic, its check against fp32, and back ends that refuse."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from recipes.bench import attention
from tests.helpers.bench_config import bench_config

CPU = torch.device("cpu")
SMALL = {"sequences": [32], "heads": [[4, 2, 16]], "tokens": 64, "warmup": 0, "repetitions": 1}


def unmasked(_inputs):
    """Attend like a kernel that forgot the causal mask."""
    return lambda query, key, value: F.scaled_dot_product_attention(
        query, key, value, enable_gqa=True
    )


def without_groups(_inputs):
    def attend(query, key, value):
        if query.shape[1] != key.shape[1]:
            raise RuntimeError("as many heads for keys as for queries")
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return attend


def too_large(_inputs):
    def attend(query, key, value):
        raise torch.OutOfMemoryError("tried to allocate 64 GiB")

    return attend


def rows(tmp_path, **args):
    result = attention.attention(bench_config(tmp_path, **{**SMALL, **args}))
    return result["rows"], result


def test_operations_are_those_of_two_products_and_five():
    forward = attention.operations(8192, 32, 128, "forward")
    assert forward == 2 * 8192 * 8192 * 128 * 32
    assert attention.operations(8192, 32, 128, "forward", causal=False) == 2 * forward
    assert attention.operations(8192, 32, 128, "backward") == 2.5 * forward


def test_figures_follow_from_time_and_operations(tmp_path):
    (row, *_), result = rows(tmp_path, backends=["math"], passes=["forward"])
    assert row["batch_size"] == 2  # 64 tokens in rows of 32
    assert row["tflops"] == pytest.approx(
        2 * attention.operations(32, 4, 16, "forward") / row["ms"] / 1e9
    )
    assert row["share_of_peak"] == pytest.approx(row["tflops"] / 0.1)
    assert (row["heads"], row["keys"], row["error"]) == ("4 2 16", "grouped", None)
    assert result["figure"] == "tflops"


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("backend", ["eager", "math", "flash"])
def test_right_kernels_are_near_fp32(backend, dtype, most):
    actual = attention.errors(backend, "4 2 32", dtype, CPU, seed=0)
    assert set(actual) == {"forward", "backward"}
    assert max(actual.values()) <= most


def test_a_wrong_kernel_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "flash", unmasked)
    measured, result = rows(tmp_path, backends=["math", "flash"])
    errors = {(row["backend"], row["pass"]): row["max_error"] for row in measured}
    assert errors["math", "backward"] < 1e-5
    assert min(errors["flash", "forward"], errors["flash", "backward"]) > attention.WRONG
    assert sum("flash is wrong" in note for note in result["notes"]) == 2


def test_the_gradient_is_the_same_whatever_strides_the_output_has(monkeypatch):
    def transposed(_inputs):  # as flash kernels on a GPU return it
        return lambda *inputs: attention.eager(*inputs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setitem(attention.BACKENDS, "flash", transposed)
    assert attention.errors("flash", "4 2 32", torch.float32, CPU, seed=0)["backward"] < 1e-5


def test_inputs_lie_as_a_models_projections_leave_them():
    query, key, _ = attention.random_inputs(2, 8, "4 2 16", torch.float32, CPU)
    assert query.shape == (2, 4, 8, 16)
    assert query.transpose(1, 2).is_contiguous()
    assert key.transpose(1, 2).is_contiguous()


def test_keys_are_repeated_for_a_back_end_without_groups(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "efficient", without_groups)
    measured, _ = rows(tmp_path, backends=["efficient"])
    assert [row["keys"] for row in measured] == ["repeated", "repeated"]
    assert max(row["max_error"] for row in measured) < 1e-5


def test_a_missing_back_end_is_a_row_and_the_series_continues(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "cudnn", too_large)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    heads = [[4, 2, 16], [3, 2, 16]]
    backends = ["efficient", "cudnn", "flex", "flash-attn", "math"]
    measured, _ = rows(tmp_path, backends=backends, heads=heads)
    measured, indivisible = measured[:10], measured[10:]
    assert all(row["error"] for row in indivisible)
    errors = {(row["backend"], row["pass"]): row["error"] for row in measured}
    assert "No viable backend" in errors["efficient", "forward"]
    assert errors["cudnn", "forward"] == errors["cudnn", "backward"] == "out of memory"
    assert "flash_attn" in errors["flash-attn", "forward"]
    assert errors["flex", "forward"] is None
    assert "does not support backward on CPU" in errors["flex", "backward"]
    assert errors["math", "backward"] is None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))


def test_rows_are_packed_one_after_the_other(monkeypatch):
    """Use plain attention, row by row, since torch has no varlen kernel for a CPU."""

    def kernel(ends, tokens):
        def call(query, key, value):
            parts = [
                [tensor[a:b].transpose(0, 1)[None] for tensor in (query, key, value)]
                for a, b in zip(ends, ends[1:], strict=False)
            ]
            assert all(part[0].shape[2] == tokens for part in parts)
            return torch.cat([attention.eager(*part)[0].transpose(0, 1) for part in parts])

        return call

    monkeypatch.setattr(attention, "varlen_function", kernel)
    inputs = attention.random_inputs(3, 8, "4 2 16", torch.float32, CPU)
    assert torch.allclose(attention.varlen(inputs)(*inputs), attention.eager(*inputs), atol=1e-6)


def test_the_reason_is_one_line_with_torchs_own_warning():
    warned = [
        "Memory Efficient attention has been runtime disabled. (Triggered internally at "
        "sdp_utils.cpp:600.)",
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:2.)",
        "Flash attention only supports gpu architectures in the range [sm80, sm121]. (Triggered "
        "internally at sdp_utils.cpp:3.)",
    ]
    error = RuntimeError("No available kernel. Aborting execution.\nmore")
    actual = attention.reason(error, warned)
    assert (
        actual == "No available kernel. "
        "(Flash attention only supports gpu architectures in the range [sm80, sm121].)"
    )
    assert attention.reason(ValueError(""), []) == "ValueError"
