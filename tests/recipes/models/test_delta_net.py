"""Test that a fast kernel of gated delta nets is used only if its gradients are right."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from recipes.models import delta_net

PLAIN = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)


@functools.wraps(PLAIN)
def right(*args, **kwargs):
    return PLAIN(*args, **kwargs)


@functools.wraps(PLAIN)
def wrong_gradient(query, key, value, g, beta, **kwargs):
    """Return the right output. Decays get no gradient, as in the kernel for MI355X."""
    return PLAIN(query, key, value, g=g.detach() + 0 * g, beta=beta, **kwargs)


@functools.wraps(PLAIN)
def unsupported(*args, **kwargs):
    raise RuntimeError("no kernel image is available for this GPU")


@pytest.mark.parametrize(
    ("kernel", "is_used"), [(right, True), (wrong_gradient, False), (unsupported, False)]
)
def test_a_kernel_is_used_only_if_its_gradients_are_right(monkeypatch, kernel, is_used):
    monkeypatch.setattr(modeling_qwen3_5, delta_net.RULE, kernel)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5ForCausalLM.config_class(num_hidden_layers=1))
    delta_net.check(model, "cpu")
    assert getattr(modeling_qwen3_5, delta_net.RULE) is (kernel if is_used else PLAIN)
