"""Test the operations of attention, the comparison with fp32, and unsupported back ends."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from recipes.bench import attention
from tests.helpers.bench_config import bench_config

CPU = torch.device("cpu")
SMALL = {"sequences": [32], "heads": [[4, 2, 16]], "tokens": 64, "warmup": 0, "repetitions": 1}


def unmasked(_inputs):
    """Return attention without the causal mask."""
    return lambda query, key, value: F.scaled_dot_product_attention(
        query, key, value, enable_gqa=True
    )


def without_groups(_inputs):
    def attend(query, key, value):
        if query.shape[1] != key.shape[1]:
            raise RuntimeError("keys need as many heads as queries")
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return attend


def too_large(_inputs):
    def attend(query, key, value):
        raise torch.OutOfMemoryError("tried to allocate 64 GiB")

    return attend


def transposed(_inputs):
    """Return attention whose output has the strides of flash kernels on a GPU."""
    return lambda *inputs: attention.eager(*inputs).transpose(1, 2).contiguous().transpose(1, 2)


def measure(tmp_path, **args):
    return attention.attention(bench_config(tmp_path, **{**SMALL, **args}))


def test_figures_follow_from_time_and_operations(tmp_path):
    forward = attention.operations(8192, 32, 128, "forward")
    assert forward == 2 * 8192 * 8192 * 128 * 32
    (row,) = measure(tmp_path, backends=["math"], passes=["forward"])["rows"]
    assert row["batch_size"] == 2  # 64 tokens in rows of 32
    operations = 2 * attention.operations(32, 4, 16, "forward")
    assert row["tflops"] == pytest.approx(operations / row["ms"] / 1e9)
    assert row["share_of_peak"] == pytest.approx(row["tflops"] / 0.1)
    assert (row["heads"], row["keys"], row["error"]) == ("4 2 16", "grouped", None)


def test_correct_kernels_are_near_fp32_with_any_output_strides(monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "cudnn", transposed)
    for backend, dtype, tolerance in (
        ("eager", torch.float32, 1e-5),
        ("cudnn", torch.float32, 1e-5),
        ("flash", torch.float32, 1e-5),
        ("flash", torch.bfloat16, 0.02),
    ):
        errors = attention.errors(backend, "4 2 32", dtype, CPU, seed=0)
        assert set(errors) == {"forward", "backward"}
        assert max(errors.values()) <= tolerance


def test_a_wrong_kernel_is_noted(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "flash", unmasked)
    result = measure(tmp_path, backends=["math", "flash"])
    errors = {(row["backend"], row["pass"]): row["max_error"] for row in result["rows"]}
    assert errors["math", "backward"] < 1e-5
    assert min(errors["flash", "forward"], errors["flash", "backward"]) > attention.WRONG
    assert sum(note.startswith("flash: wrong") for note in result["notes"]) == 2


def test_gradients_that_are_not_numbers_are_noted(tmp_path, monkeypatch):
    """Use a kernel that is right except for the gradients of the values."""

    def kernel(_inputs):
        # The derivative of a root is infinite at 0.
        return lambda query, key, value: attention.eager(query, key, value + 0 * (0 * value).sqrt())

    monkeypatch.setitem(attention.BACKENDS, "flash", kernel)
    errors = attention.errors("flash", "4 2 32", torch.float32, CPU, seed=0)
    assert errors["forward"] < 1e-5
    assert math.isnan(errors["backward"])
    result = measure(tmp_path, backends=["flash"])
    assert any("max_error became inf or nan" in note for note in result["notes"])


def test_only_the_rows_of_flash_ck_prefer_composable_kernel(tmp_path, monkeypatch):
    """Read the preference when each kernel runs, forward and backward."""
    preferred, read = [], torch.backends.cuda.preferred_rocm_fa_library

    def kernel(_inputs):
        class Spy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tensor):
                preferred.append(read().name)
                return tensor.clone()

            @staticmethod
            def backward(ctx, gradient):
                preferred.append(read().name)
                return gradient

        return lambda *inputs: Spy.apply(attention.eager(*inputs))

    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: True)
    for backend in ("flash", "flash-ck", "math"):
        monkeypatch.setitem(attention.BACKENDS, backend, kernel)
        measure(tmp_path, backends=[backend], passes=["backward"])
        assert set(preferred) == {"Ck" if backend == "flash-ck" else "Default"}
        preferred.clear()


def test_unsupported_back_ends_become_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "cudnn", too_large)
    monkeypatch.setitem(attention.BACKENDS, "varlen", without_groups)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    backends = ["efficient", "cudnn", "flex", "flash-attn", "varlen", "math"]
    rows = measure(tmp_path / "ck", backends=["flash-ck", "math"], passes=["forward"])["rows"]
    assert "gfx942 and gfx950" in rows[0]["error"]
    rows = measure(tmp_path, backends=backends, heads=[[4, 2, 16], [3, 2, 16]])["rows"]
    errors = {(row["backend"], row["pass"]): row["error"] for row in rows[:12]}
    assert "No viable backend" in errors["efficient", "forward"]
    assert errors["cudnn", "forward"] == errors["cudnn", "backward"] == "out of memory"
    assert "flash_attn" in errors["flash-attn", "forward"]
    assert errors["flex", "forward"] is errors["math", "backward"] is None
    assert "does not support backward on CPU" in errors["flex", "backward"]
    repeated = [row for row in rows[:12] if row["backend"] == "varlen"]
    assert [row["keys"] for row in repeated] == ["repeated", "repeated"]
    assert max(row["max_error"] for row in repeated) < 1e-5
    assert all(row["error"] for row in rows[12:])  # 3 heads are not a multiple of 2


def test_varlen_packs_rows(monkeypatch):
    """Replace varlen_attn by eager attention, because torch has no varlen kernel for a CPU."""

    def kernel(query, key, value, ends, _ends, tokens, _tokens, window_size, enable_gqa):
        parts = [
            [tensor[a:b].transpose(0, 1)[None] for tensor in (query, key, value)]
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        assert all(part[0].shape[2] == tokens for part in parts)
        return torch.cat([attention.eager(*part)[0].transpose(0, 1) for part in parts])

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    inputs = attention.random_inputs(3, 8, "4 2 16", torch.float32, CPU)
    assert torch.allclose(attention.varlen(inputs)(*inputs), attention.eager(*inputs), atol=1e-6)
