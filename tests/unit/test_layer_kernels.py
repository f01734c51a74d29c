"""recipes/tune/layer_kernels.py without Triton: what stands in for a GPU, and the gradients without autograd's engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from recipes.tune import layer_kernels
from recipes.tune.amdgpu import ARCHITECTURES


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(size, requires_grad=True) for size in ((3, 4), (4, 4), (4,), (1,)))


def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Use a tensor twice, broadcast one, change the type, take a part, and return a tensor that leads to another."""
    hidden = (x @ weight + bias).to(torch.float64)
    mixed = torch.nn.functional.silu(hidden) * hidden[:, :1]
    return mixed, (mixed.to(torch.float32) * x).sum()


def test_gradients_are_those_of_the_engine() -> None:
    inputs = tensors()
    outputs = function(*inputs)
    seeds = [torch.ones_like(one) for one in outputs]
    expected = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, retain_graph=True)
    found = layer_kernels.gradients(outputs, inputs, seeds, allow_unused=True)
    assert found[-1] is expected[-1] is None
    for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_an_output_without_a_gradient_adds_nothing() -> None:
    inputs = tensors()
    outputs = function(*inputs)
    seed = torch.ones_like(outputs[0])
    found = layer_kernels.gradients(outputs, inputs[:2], [seed, None])
    expected = torch.autograd.grad(outputs[:1], inputs[:2], [seed])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("arch", "major_minor", "multiprocessors", "lanes", "registers"),
    [("gfx942", (9, 4), 228, 64, 4 * 512 * 64), ("gfx90a", (9, 0), 104, 64, 4 * 512 * 64), ("gfx1100", (11, 0), 48, 32, 4 * 1536 * 32)],
)
def test_properties_are_those_of_the_hardware_file(
    arch: str, major_minor: tuple[int, int], multiprocessors: int, lanes: int, registers: int
) -> None:
    found = layer_kernels.device_properties(arch)
    assert (found.major, found.minor) == major_minor
    assert (found.multi_processor_count, found.warp_size, found.regs_per_multiprocessor) == (multiprocessors, lanes, registers)
    assert found.gcnArchName == arch


def test_a_hardware_file_is_read_with_its_bases() -> None:
    found = layer_kernels.read_hardware(layer_kernels.HARDWARE / "mi325x.yaml")
    assert (found["gfx"], found["compute_units"], found["memory_gb"], found["attention"]) == ("gfx942", 304, 256, "sdpa")
    assert "defaults" not in found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_layer_is_compiled_with_the_attention_of_its_hardware_file(arch: str) -> None:
    padded, *packed = layer_kernels.attentions_of(arch)
    assert padded == {"gfx908": "math", "gfx1151": "eager"}.get(arch, "flash")
    assert packed == {"varlen": ["varlen"], None: []}[layer_kernels.hardware_of(arch)["packed_attention"]]


@pytest.mark.parametrize("attention", ["flash", "math", "eager", "varlen", "flex"])
def test_rows_of_a_batch(attention: str) -> None:
    assert layer_kernels.Layer(Path("any"), attention, 4096, "amp").sequences == (1 if attention in ("varlen", "flex") else 2)


@pytest.mark.parametrize("file", sorted(layer_kernels.HARDWARE.parent.glob("model/*.yaml")), ids=lambda file: file.stem)
def test_one_layer_of_every_model_has_its_shape(file: Path) -> None:
    shape, found = yaml.safe_load(file.read_text()), layer_kernels.config_of(file)
    assert found.num_hidden_layers == 1
    assert (found.model_type, found.hidden_size, found.head_dim) == (shape["architecture"], shape["hidden_size"], shape["head_dim"])
    assert found.rms_norm_eps == float(shape["rms_norm_eps"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("triton_poi_fused_add_5", "pointwise"), ("triton_per_fused_mean_1", "persistent reduction"), ("triton_mix_fused_7", "mix")],
)
def test_the_kind_of_a_kernel_stands_in_its_name(name: str, kind: str) -> None:
    assert layer_kernels.kind_of(name) == kind
