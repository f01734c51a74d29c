"""Compute the language-model head and its loss in one pass, a tile of tokens at a time.

TRL's own head recomputes a tile's logits in the backward pass, since the loss may be any function
of the log-probabilities. SFT's loss is their plain sum, so each tile's gradient can be computed
while its logits exist. For DPO, the gradients of the tokens' log-probabilities are stored, unless
they are too large, and scaled in the backward pass.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from trl.kernels import chunked_logprob as trl_kernels
from trl.trainer import utils as trl_utils

TOKENS = 4096  # per tile: its logits are 1.2 GB in 16 bits for a vocabulary of 152,000
FP16_SCALE = 1024.0  # probabilities of a large vocabulary lie below fp16's normal range
# Limit in bytes on the logits' gradients in StoredHead. 4 pairs of 1,024 tokens take 2.5e9.
KEPT = 3_000_000_000
# Configuration keys of models whose head does more than a matrix product. They use TRL's head.
SCALED = (
    *("final_logit_softcapping", "logit_scale", "logits_scaling"),
    *("output_multiplier", "lm_head_multiplier"),
)


class NllHead(torch.autograd.Function):
    """Sum negative log-likelihood, entropy and correct predictions over tokens.

    hidden: (tokens, width), weight: (vocabulary, width), targets: (tokens). Return the loss () and
    (entropy, correct) (2,) in fp32; only the loss is differentiable. With `train`, its gradients
    are computed in the forward pass and scaled in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, train: bool
    ) -> tuple[Tensor, Tensor]:
        device, (dtype, unit) = hidden.device, _compute(hidden)
        of_hidden, of_weight = (train and needed for needed in ctx.needs_input_grad[:2])
        cast = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden, dtype=dtype) if of_hidden else None
        grad_weight = (
            torch.zeros(weight.shape, device=device, dtype=torch.float32) if of_weight else None
        )
        loss, counted = torch.zeros((), device=device), torch.zeros(2, device=device)
        # reused by all tiles
        buffer = torch.empty((min(len(hidden), TOKENS), len(weight)), device=device, dtype=dtype)
        for start in range(0, len(hidden), TOKENS):
            tile = slice(start, start + TOKENS)
            rows = hidden[tile].to(dtype)
            logits = torch.mm(rows, cast.t(), out=buffer[: len(rows)])
            nll, entropy, correct, _ = _statistics(
                logits, targets[tile], (of_hidden or of_weight) and unit
            )
            loss += nll.sum()
            counted += torch.stack((entropy.sum(), correct.sum()))
            if grad_hidden is not None:  # `logits` now contains its own gradient
                torch.mm(logits, cast, out=grad_hidden[tile])
            if grad_weight is not None:
                trl_kernels._addmm_fp32(grad_weight, logits.t(), rows)
        ctx.grads, ctx.unit = (grad_hidden, grad_weight), unit
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(counted)
        return loss, counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        scale = grad / ctx.unit
        scaled = [
            stored_grad if stored_grad is None else (stored_grad.mul_(scale)).to(dtype)
            for stored_grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return scaled[0], scaled[1], None, None


class _Stored(torch.autograd.Function):
    """Return log-probabilities, entropies, correct predictions and mean logits, (tokens) each.

    The forward pass stores the gradients of the log-probabilities.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        device, (dtype, unit) = hidden.device, _compute(hidden)
        cast, rows = weight.to(dtype), hidden.to(dtype)
        of_weight = ctx.needs_input_grad[1]
        stored = torch.empty(
            (len(rows) if of_weight else min(len(rows), TOKENS), len(weight)),
            device=device,
            dtype=dtype,
        )
        grad_hidden = torch.empty_like(rows)
        tiles = []
        for start in range(0, len(rows), TOKENS):
            tile = slice(start, min(start + TOKENS, len(rows)))
            logits = stored[tile] if of_weight else stored[: tile.stop - start]
            torch.mm(rows[tile], cast.t(), out=logits)
            tiles.append(_statistics(logits, targets[tile], unit))
            torch.mm(logits, cast, out=grad_hidden[tile])
        ctx.save_for_backward(grad_hidden, *((stored, rows) if of_weight else ()))
        ctx.unit, ctx.dtypes = unit, (hidden.dtype, weight.dtype)
        nll, *figures = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        ctx.mark_non_differentiable(*figures)
        return -nll, *figures

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, *of_weight = ctx.saved_tensors
        scale = (grad / -ctx.unit)[:, None]  # the stored gradients are of the negative log-probs
        grad_weight = None
        if of_weight:
            stored, rows = of_weight
            grad_weight = torch.mm(stored.t(), (rows * scale).to(rows.dtype)).to(ctx.dtypes[1])
        return (grad_hidden * scale).to(ctx.dtypes[0]), grad_weight, None


class StoredHead:
    """Replace TRL's ChunkedLogProbFunction if only log-probabilities need gradients."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Any,
        targets: Tensor,
        temperature: float,
        chunk: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Any, ...]:
        plain = bias is None and softcap is None and temperature == scale == 1.0
        stored = len(hidden) * len(weight) * 2 if weight.requires_grad else 0
        if (
            not (plain and len(hidden) and torch.is_grad_enabled())
            or "log_sum_sq_probs" in outputs
            or stored > KEPT
        ):
            arguments = (hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs)
            return trl_kernels.ChunkedLogProbFunction.apply(*arguments)
        log_probs, entropy, correct, mean = _Stored.apply(hidden, weight, targets)
        names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        figures = zip(names, (entropy, None, mean, correct), strict=True)
        return log_probs, *(figure if name in outputs else None for name, figure in figures)


def store() -> None:
    """Let the heads that TRL adds to models in this process use StoredHead."""
    trl_utils._ChunkedLogProbFunction = StoredHead


def _compute(hidden: Tensor) -> tuple[torch.dtype, float]:
    """Return the dtype of the head's product, and the scale of its gradients."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return dtype, FP16_SCALE if dtype is torch.float16 else 1.0


def _statistics(logits: Tensor, targets: Tensor, unit: float | bool) -> tuple[Tensor, ...]:
    """Return (nll, entropy, correct, mean) of each row of `logits`, by TRL's kernels.

    With `unit`, overwrite `logits` with `unit` times d nll / d logits.
    """
    (n, vocabulary), device = logits.shape, logits.device
    triton = trl_kernels._use_triton(device)
    highest, before_target = (torch.full((n,), float("-inf"), device=device) for _ in range(2))
    sums, weighted, squares, added, target = (torch.zeros(n, device=device) for _ in range(5))
    plain = {"logit_scale": 1.0, "softcap": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False}
    plain["BLOCK_SIZE"] = trl_kernels._BLOCK_SIZE
    outputs = {"HAS_ENTROPY": True, "HAS_LOG_SUM_SQ_PROBS": False}
    outputs |= {"HAS_MEAN_LOGITS": True, "HAS_IS_TOP1": True}
    fold = trl_kernels._forward_kernel[(n,)] if triton else trl_kernels._forward_tile
    state = (highest, sums, weighted, squares, added, before_target, target)
    fold(logits, logits.stride(0), targets, *state, 0, vocabulary, **outputs, **plain)
    log_z = highest + sums.log()
    if unit:
        blocks = -(-vocabulary // trl_kernels._BLOCK_SIZE)
        unfold = trl_kernels._backward_kernel[(n, blocks)] if triton else trl_kernels._backward_tile
        gradient = torch.full((n,), -float(unit), device=device)
        grads = {"HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": False}
        state = (log_z, log_z, gradient, log_z)
        unfold(logits, logits.stride(0), targets, *state, 0, vocabulary, **grads, **plain)
    return (
        log_z - target,
        log_z - weighted / sums,
        (target >= highest) & (target > before_target),
        added / vocabulary,
    )


def fits(model: PreTrainedModel) -> bool:
    """Return whether the head of `model` is only a product of hidden states and a weight."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    return (
        type(head) is nn.Linear
        and head.bias is None
        and not any(getattr(config, name, None) for name in SCALED)
    )


@dataclass
class Sums(ModelOutput):
    """The outputs of NllHead: a scalar `loss`, and `counted` (2,) with entropy and correct.

    This is a subclass because a bare ModelOutput loses its attributes under torch.compile.
    """

    loss: Tensor | None = None
    counted: Tensor | None = None


@dataclass
class LogProbs(ModelOutput):
    """The log-probability of each target, and the entropy of its distribution: (tokens), fp32."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def sums(hidden: Tensor, weight: Tensor, targets: Tensor) -> Sums:
    loss, counted = NllHead.apply(hidden, weight, targets, torch.is_grad_enabled())
    return Sums(loss, counted)


def log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, of_entropy: bool
) -> LogProbs:
    """Return the targets' log-probabilities and entropies at a temperature.

    hidden: (tokens, width), weight: (vocabulary, width), targets: (tokens). The entropy has a
    gradient only with `of_entropy`.
    """
    function = trl_kernels.ChunkedLogProbFunction if of_entropy else StoredHead
    chunk = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    values, entropy, *_ = function.apply(
        hidden, weight, None, targets, temperature, chunk, None, 1.0, ("entropy",)
    )
    return LogProbs(values, entropy)


def add(model: PreTrainedModel, compute: Callable[..., ModelOutput] = sums) -> None:
    """Make `model(..., targets=, target_positions=)` return `compute(hidden, weight, targets)`.

    target_positions: (targets), the indices in the flattened batch at which targets are predicted.
    The head is computed only there. It stays inside the model's forward, because of DDP's and
    FSDP's hooks.
    """
    original_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` inspects its arguments
    def forward(
        self: PreTrainedModel,
        *args: Any,
        targets: Any = None,
        target_positions: Any = None,
        **kwargs: Any,
    ) -> Any:
        if targets is None:
            return original_forward(*args, **kwargs)
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        weight = self.get_output_embeddings().weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        selected = hidden.flatten(0, 1).index_select(0, target_positions)
        return compute(selected, weight, targets)

    model.forward = types.MethodType(forward, model)
