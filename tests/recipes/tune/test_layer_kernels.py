"""Test recipes/tune/layer_kernels.py without Triton: the stand-in GPU and its gradients."""

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


def function(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Use a tensor twice, broadcast one, change the type, and take a part."""
    hidden = (x @ weight + bias).to(torch.float64)
    mixed = torch.nn.functional.silu(hidden) * hidden[:, :1]
    return mixed, (mixed.to(torch.float32) * x).sum()


def test_gradients_are_those_of_the_engine() -> None:
    inputs = tensors()
    outputs = function(*inputs)
    seeds = [torch.ones_like(one) for one in outputs]
    expected = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, retain_graph=True)
    actual = layer_kernels.gradients(outputs, inputs, seeds, allow_unused=True)
    assert actual[-1] is expected[-1] is None
    for ours, theirs in zip(actual[:-1], expected[:-1], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_an_output_without_a_gradient_adds_nothing() -> None:
    inputs = tensors()
    outputs = function(*inputs)
    seed = torch.ones_like(outputs[0])
    actual = layer_kernels.gradients(outputs, inputs[:2], [seed, None])
    expected = torch.autograd.grad(outputs[:1], inputs[:2], [seed])
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("arch", "major_minor", "multiprocessors", "lanes", "registers"),
    [
        ("gfx942", (9, 4), 228, 64, 4 * 512 * 64),
        ("gfx90a", (9, 0), 104, 64, 4 * 512 * 64),
        ("gfx1100", (11, 0), 48, 32, 4 * 1536 * 32),
    ],
)
def test_properties_are_those_of_the_hardware_file(
    arch: str, major_minor: tuple[int, int], multiprocessors: int, lanes: int, registers: int
) -> None:
    actual = layer_kernels.device_properties(arch)
    assert (actual.major, actual.minor) == major_minor
    assert (actual.multi_processor_count, actual.warp_size, actual.regs_per_multiprocessor) == (
        multiprocessors,
        lanes,
        registers,
    )
    assert actual.gcnArchName == arch


def test_a_hardware_file_is_read_with_its_bases() -> None:
    actual = layer_kernels.read_hardware(layer_kernels.HARDWARE / "mi325x.yaml")
    assert (actual["gfx"], actual["compute_units"], actual["memory_gb"], actual["attention"]) == (
        "gfx942",
        304,
        256,
        "sdpa",
    )
    assert "defaults" not in actual


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_layer_is_compiled_with_the_attention_of_its_hardware_file(arch: str) -> None:
    padded, *packed = layer_kernels.attentions_of(arch)
    assert padded == {"gfx908": "math", "gfx1151": "eager"}.get(arch, "flash")
    assert (
        packed
        == {"varlen": ["varlen"], None: []}[layer_kernels.hardware_of(arch)["packed_attention"]]
    )


@pytest.mark.parametrize(
    "file", sorted(layer_kernels.HARDWARE.parent.glob("model/*.yaml")), ids=lambda file: file.stem
)
def test_one_layer_of_every_model_has_its_shape(file: Path) -> None:
    shape, actual = yaml.safe_load(file.read_text()), layer_kernels.config_of(file)
    assert actual.num_hidden_layers == 1
    assert (actual.model_type, actual.hidden_size, actual.head_dim) == (
        shape["architecture"],
        shape["hidden_size"],
        shape["head_dim"],
    )
    assert actual.rms_norm_eps == float(shape["rms_norm_eps"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_add_5", "pointwise"),
        ("triton_per_fused_mean_1", "persistent reduction"),
        ("triton_mix_fused_7", "mix"),
    ],
)
def test_the_kind_of_a_kernel_is_read_from_its_name(name: str, kind: str) -> None:
    assert layer_kernels.kind_of(name) == kind
