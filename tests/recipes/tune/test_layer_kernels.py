"""Test recipes/tune/layer_kernels.py without Triton: the stand-in GPU and its gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from recipes.tune import layer_kernels
from recipes.tune.amdgpu import ARCHITECTURES


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(size, requires_grad=True) for size in ((3, 4), (4, 4), (4,), (1,)))


def function(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute with a reused tensor, a broadcast, a conversion and a slice."""
    hidden = (x @ weight + bias).to(torch.float64)
    mixed = torch.nn.functional.silu(hidden) * hidden[:, :1]
    return mixed, (mixed.to(torch.float32) * x).sum()


def test_gradients_equal_those_of_the_engine() -> None:
    inputs = tensors()
    outputs = function(*inputs)
    seeds = [torch.ones_like(output) for output in outputs]
    expected = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, retain_graph=True)
    actual = layer_kernels.gradients(outputs, inputs, seeds, allow_unused=True)
    assert actual[-1] is expected[-1] is None
    torch.testing.assert_close(actual[:-1], expected[:-1])
    # An output without a gradient adds nothing.
    outputs = function(*inputs)
    expected = torch.autograd.grad(outputs[:1], inputs[:2], seeds[:1], retain_graph=True)
    torch.testing.assert_close(
        layer_kernels.gradients(outputs, inputs[:2], [seeds[0], None]), expected
    )


def test_inductor_is_imported_after_the_stand_in() -> None:
    """Inductor looks for ROCm when it is imported, and its limits for kernels depend on that."""
    loaded = "import recipes.tune.layer_kernels, sys; print(*sys.modules, sep='\\n')"
    argv = [sys.executable, "-c", loaded]
    modules = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    assert "torch" in modules
    assert not [name for name in modules if name.startswith("torch._inductor")]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_layer_is_compiled_with_the_attention_of_its_hardware_file(arch: str) -> None:
    padded, *packed = layer_kernels.attentions_of(arch)
    assert padded == {"gfx908": "math", "gfx1030": "math", "gfx1151": "eager"}.get(arch, "flash")
    expected = layer_kernels.hardware_of(arch)["packed_attention"]
    assert packed == ([expected] if expected else [])
