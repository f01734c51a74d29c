"""Compute the language-model head and its loss in one pass, a tile of tokens at a time.

TRL's head recomputes a tile's logits in the backward pass, since the loss may be any function of
the log-probabilities. SFT's loss is their sum, so a tile's gradient can be computed while its
logits are in memory. For DPO, the gradients of the log-probabilities are stored, unless they are
too large. The backward pass then only scales them.
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

TOKENS = 4096  # per tile; its logits take 1.2 GB in 16 bits for a vocabulary of 152,000
FOLDED = 2**23  # logits that TRL's torch code, used without Triton, processes together
FP16_SCALE = 1024.0  # of gradients, since many probabilities are below fp16's normal range
# For the logits' gradients in StoredHead. 4 pairs of 1,024 tokens take 2.5e9.
MAX_STORED_BYTES = 3_000_000_000
# Configuration keys of models whose head does more than a matrix product. They use TRL's head.
SCALING_KEYS = (
    *("final_logit_softcapping", "logit_scale", "logits_scaling"),
    *("output_multiplier", "lm_head_multiplier"),
)


def _by_rows(fold: Callable[..., None]) -> Callable[..., None]:
    """Return TRL's torch version of a kernel, applied to some rows of a tile at a time.

    Its temporary tensors take 33 bytes per logit: 5 GB for 1,024 tokens and 152,000 entries.
    """

    @functools.wraps(fold)
    def fold_rows(tile: Tensor, stride: int, *state: Any, **options: Any) -> None:
        size = max(1, FOLDED // tile.shape[1])
        for start in range(0, len(tile), size):
            rows = slice(start, start + size)
            parts = (part[rows] if isinstance(part, Tensor) else part for part in state)
            fold(tile[rows], stride, *parts, **options)

    return fold_rows


# TRL's head and ours find them in its module
trl_kernels._forward_tile = _by_rows(trl_kernels._forward_tile)
trl_kernels._backward_tile = _by_rows(trl_kernels._backward_tile)


class NllHead(torch.autograd.Function):
    """Sum negative log-likelihood, entropy and correct predictions over tokens.

    hidden: (tokens, width), weight: (vocabulary, width), targets: (tokens). Return the loss, (),
    and the sums (entropy, correct), (2,), in fp32. Only the loss is differentiable. If `train`, the
    forward pass computes its gradients, which the backward pass scales.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, train: bool
    ) -> tuple[Tensor, Tensor]:
        device, (dtype, grad_scale) = hidden.device, _compute_dtype(hidden)
        hidden_grad, weight_grad = (train and needs for needs in ctx.needs_input_grad[:2])
        cast = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden, dtype=dtype) if hidden_grad else None
        grad_weight = (
            torch.zeros(weight.shape, device=device, dtype=torch.float32) if weight_grad else None
        )
        loss, counted = torch.zeros((), device=device), torch.zeros(2, device=device)
        # All tiles share this buffer.
        buffer = torch.empty((min(len(hidden), TOKENS), len(weight)), device=device, dtype=dtype)
        for start in range(0, len(hidden), TOKENS):
            tile = slice(start, start + TOKENS)
            rows = hidden[tile].to(dtype)
            logits = torch.mm(rows, cast.t(), out=buffer[: len(rows)])
            nll, entropy, correct, _ = _statistics(
                logits, targets[tile], (hidden_grad or weight_grad) and grad_scale
            )
            loss += nll.sum()
            counted += torch.stack((entropy.sum(), correct.sum()))
            if grad_hidden is not None:  # `logits` now contains its own gradient
                torch.mm(logits, cast, out=grad_hidden[tile])
            if grad_weight is not None:
                trl_kernels._addmm_fp32(grad_weight, logits.t(), rows)
        ctx.grads, ctx.grad_scale = (grad_hidden, grad_weight), grad_scale
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(counted)
        return loss, counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        scale = grad / ctx.grad_scale
        scaled = [
            stored_grad if stored_grad is None else (stored_grad.mul_(scale)).to(dtype)
            for stored_grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return scaled[0], scaled[1], None, None


class _StoredGradients(torch.autograd.Function):
    """Return log-probabilities, entropies, correct predictions and mean logits, (tokens) each.

    The forward pass stores the gradients of the log-probabilities.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        device, (dtype, grad_scale) = hidden.device, _compute_dtype(hidden)
        cast, rows = weight.to(dtype), hidden.to(dtype)
        weight_grad = ctx.needs_input_grad[1]
        stored = torch.empty(
            (len(rows) if weight_grad else min(len(rows), TOKENS), len(weight)),
            device=device,
            dtype=dtype,
        )
        grad_hidden = torch.empty_like(rows)
        tiles = []
        for start in range(0, len(rows), TOKENS):
            tile = slice(start, min(start + TOKENS, len(rows)))
            logits = stored[tile] if weight_grad else stored[: tile.stop - start]
            torch.mm(rows[tile], cast.t(), out=logits)
            tiles.append(_statistics(logits, targets[tile], grad_scale))
            torch.mm(logits, cast, out=grad_hidden[tile])
        ctx.save_for_backward(grad_hidden, *((stored, rows) if weight_grad else ()))
        ctx.grad_scale, ctx.dtypes = grad_scale, (hidden.dtype, weight.dtype)
        nll, *figures = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        ctx.mark_non_differentiable(*figures)
        return -nll, *figures

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, *saved = ctx.saved_tensors
        scale = (grad / -ctx.grad_scale)[:, None]  # stored gradients are of negative log-probs
        grad_weight = None
        if saved:
            stored, rows = saved
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
        is_plain = bias is None and softcap is None and temperature == scale == 1.0
        stored_bytes = len(hidden) * len(weight) * 2 if weight.requires_grad else 0
        if (
            not (is_plain and len(hidden) and torch.is_grad_enabled())
            or "log_sum_sq_probs" in outputs
            or stored_bytes > MAX_STORED_BYTES
        ):
            arguments = (hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs)
            return trl_kernels.ChunkedLogProbFunction.apply(*arguments)
        log_probs, entropy, correct, mean = _StoredGradients.apply(hidden, weight, targets)
        names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        figures = zip(names, (entropy, None, mean, correct), strict=True)
        return log_probs, *(figure if name in outputs else None for name, figure in figures)


def use_stored_head() -> None:
    """Make TRL's heads in this process use StoredHead."""
    trl_utils._ChunkedLogProbFunction = StoredHead


def _compute_dtype(hidden: Tensor) -> tuple[torch.dtype, float]:
    """Return the dtype of the head's matrix product, and the scale of its gradients."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return dtype, FP16_SCALE if dtype is torch.float16 else 1.0


def _statistics(logits: Tensor, targets: Tensor, grad_scale: float | bool) -> tuple[Tensor, ...]:
    """Return (nll, entropy, correct, mean logit) of each row of `logits`, by TRL's kernels.

    If `grad_scale` is not 0, overwrite `logits` with grad_scale * (d nll / d logits).
    """
    (n, vocabulary), device = logits.shape, logits.device
    triton = trl_kernels._use_triton(device)
    highest, before_target = (torch.full((n,), float("-inf"), device=device) for _ in range(2))
    sums, weighted, squares, logit_sums, target = (torch.zeros(n, device=device) for _ in range(5))
    plain = {"logit_scale": 1.0, "softcap": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False}
    plain["BLOCK_SIZE"] = trl_kernels._BLOCK_SIZE
    outputs = {"HAS_ENTROPY": True, "HAS_LOG_SUM_SQ_PROBS": False}
    outputs |= {"HAS_MEAN_LOGITS": True, "HAS_IS_TOP1": True}
    forward = trl_kernels._forward_kernel[(n,)] if triton else trl_kernels._forward_tile
    state = (highest, sums, weighted, squares, logit_sums, before_target, target)
    forward(logits, logits.stride(0), targets, *state, 0, vocabulary, **outputs, **plain)
    log_z = highest + sums.log()
    if grad_scale:
        grid = (n, -(-vocabulary // trl_kernels._BLOCK_SIZE))
        backward = trl_kernels._backward_kernel[grid] if triton else trl_kernels._backward_tile
        gradient = torch.full((n,), -float(grad_scale), device=device)
        grads = {"HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": False}
        state = (log_z, log_z, gradient, log_z)
        backward(logits, logits.stride(0), targets, *state, 0, vocabulary, **grads, **plain)
    return (
        log_z - target,
        log_z - weighted / sums,
        (target >= highest) & (target > before_target),
        logit_sums / vocabulary,
    )


def fits(model: PreTrainedModel) -> bool:
    """Return whether the head of `model` is only a product of hidden states and a weight."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    return (
        type(head) is nn.Linear
        and head.bias is None
        and not any(getattr(config, name, None) for name in SCALING_KEYS)
    )


@dataclass
class Sums(ModelOutput):
    """Hold NllHead's `loss`, (), and the sums `counted`, (2,): entropy and correct predictions.

    A bare ModelOutput would lose its attributes under torch.compile.
    """

    loss: Tensor | None = None
    counted: Tensor | None = None


@dataclass
class LogProbs(ModelOutput):
    """Hold each target's log-probability, and the entropy of its distribution: (tokens), fp32."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def sums(hidden: Tensor, weight: Tensor, targets: Tensor) -> Sums:
    loss, counted = NllHead.apply(hidden, weight, targets, torch.is_grad_enabled())
    return Sums(loss, counted)


def log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_grad: bool
) -> LogProbs:
    """Return the targets' log-probabilities and entropies at a temperature.

    hidden: (tokens, width), weight: (vocabulary, width), targets: (tokens). The entropy is
    differentiable only if `entropy_grad`.
    """
    function = trl_kernels.ChunkedLogProbFunction if entropy_grad else StoredHead
    chunk = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    values, entropy, *_ = function.apply(
        hidden, weight, None, targets, temperature, chunk, None, 1.0, ("entropy",)
    )
    return LogProbs(values, entropy)


def add(model: PreTrainedModel, compute: Callable[..., ModelOutput] = sums) -> None:
    """Make `model(..., targets=, target_positions=)` return `compute(hidden, weight, targets)`.

    target_positions: (targets), the indices in the flattened batch where targets are predicted.
    The head is computed only there. It runs inside the model's forward, since the hooks of DDP and
    FSDP are there.
    """
    original_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` inspects the arguments
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
