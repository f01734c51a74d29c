"""Test attention without masks, and what replaces a kernel that is wrong on this GPU."""

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

from recipes.models import packed_attention
from tests.helpers.trainers import assert_same, built, trained

# hardware.packed_attention=varlen computes only 16-bit dtypes with the kernel.
VARLEN = ["hardware.packed_attention=varlen", "precision=bf16"]


@pytest.mark.parametrize(("kind", "keys", "expected"), [
    ("qwen3", {}, packed_attention.NAME),
    ("mixtral", {"sliding_window": None}, packed_attention.NAME),
    ("mistral", {"sliding_window": 16}, "sdpa"),  # without a mask, the window would be ignored
    ("olmo3", {}, "sdpa"),
    ("gemma3_text", {}, "sdpa"),
    ("gpt_oss", {}, "eager"),  # sdpa would ignore the sinks
], ids=str)  # fmt: skip
def test_windows_and_sinks_get_an_attention_that_respects_them(kind, keys, expected):
    config = OmegaConf.create({"hardware": {"attention": "sdpa"}, "method": {"name": "sft"}})
    assert packed_attention.implementation(config, AutoConfig.for_model(kind, **keys)) == expected


def wrong(query, key, value, starts, longest, scaling):
    """Let documents attend to each other."""
    ends = torch.tensor([0, len(query)])
    return packed_attention._by_document(query, key, value, ends, longest, scaling)


@pytest.mark.parametrize(("method", "overrides"), [
    ("sft", ["step.rows=packed"]),
    ("sft", ["method.args.packing=true", "method.args.max_length=64"]),
    ("grpo", ["step.rows=packed"]),
])  # fmt: skip
@pytest.mark.parametrize(("kernel", "agrees"), [("_by_document", True), ("wrong", False)])
def test_a_wrong_kernel_is_replaced_before_the_first_update(
    tmp_path, monkeypatch, capsys, method, overrides, kernel, agrees
):
    kernels = {"varlen": packed_attention._by_document}
    monkeypatch.setattr(packed_attention, "KERNELS", kernels)
    expected = trained(built(tmp_path / "exact", method, *VARLEN, *overrides)[1])
    kernels["varlen"] = used = wrong if kernel == "wrong" else packed_attention._by_document
    config, trainer = built(tmp_path / "checked", method, *VARLEN, *overrides)
    trainer.compile_layers(config)
    assert_same(trained(trainer), expected)
    assert (kernels["varlen"] is used) == agrees
    assert ("warning: packed rows" in capsys.readouterr().out) != agrees
