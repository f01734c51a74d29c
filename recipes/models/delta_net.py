"""Check a fast kernel of gated delta nets before a model uses it.

flash-linear-attention returned wrong gradients on MI355X
(https://github.com/fla-org/flash-linear-attention/issues/1156).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from recipes.rank.program import say

RULE = "torch_chunk_gated_delta_rule"  # transformers replaces it by an installed package's
TOKENS, HEADS, WIDTH = 130, 2, 128  # more than two chunks; WIDTH is that of Qwen3.5
TOLERANCE = 0.05  # relative error; rounding to bf16 causes about a hundredth


def check(model: nn.Module, device: torch.device | str) -> None:
    """Replace the kernel by transformers' plain function if its results or gradients differ."""
    module = sys.modules[type(model).__module__]
    kernel = getattr(module, RULE, None)
    if kernel is None or kernel is (plain := inspect.unwrap(kernel)):
        return
    try:
        error = max(
            float((fast.float() - exact).norm() / exact.norm())
            for fast, exact in zip(
                _results(kernel, device, torch.bfloat16),
                _results(plain, device, torch.float32),
                strict=True,
            )
        )
        problem = f"differs by {error:.0%}" if not error <= TOLERANCE else ""
    except Exception as error:  # kernels raise many types if they do not support a GPU
        problem = f"fails ({type(error).__name__})"
    if problem:
        setattr(module, RULE, plain)
        say(f"gated delta net: the fast kernel {problem}, so the slower plain function is used")


def _results(
    rule: Callable[..., tuple[Tensor, ...]], device: torch.device | str, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output and the gradients of queries, keys, values, decays and rates."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, weight = torch.randn(4, 1, TOKENS, HEADS, WIDTH, generator=generator)
    decay, rate = torch.randn(2, 1, TOKENS, HEADS, generator=generator)
    inputs = [query, key, value, nn.functional.logsigmoid(decay), rate.sigmoid()]
    # Both dtypes start from the same rounded values. Decays are in fp32, as in the model.
    inputs = [part.bfloat16().to(device, dtype).requires_grad_() for part in inputs]
    with torch.enable_grad():
        q, k, v, g, beta = inputs
        output = rule(q, k, v, g=g.float(), beta=beta, use_qk_l2norm_in_kernel=True)[0]
        gradients = torch.autograd.grad((output.float() * weight.to(device)).sum(), inputs)
    return [output.detach(), *gradients]
