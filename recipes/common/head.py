"""Compute the language-model head and its loss in one pass, without whole logits or a second product for the backward.

TRL's own head recomputes the logits of a tile in the backward, since any function of the log-probabilities may follow. SFT's
loss is their plain sum, so each tile's gradient is known while its logits exist. For DPO, the gradients of the tokens'
log-probabilities are kept instead, unless they are too large, and scaled in the backward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from trl.kernels import chunked_logprob as trl_kernels
from trl.trainer import utils as trl_utils

TOKENS = 4096  # per tile: its logits are 1.2 GB in 16 bits for a vocabulary of 152,000
FP16_SCALE = 1024.0  # probabilities of a large vocabulary lie below fp16's normal range
KEPT = 3_000_000_000  # bytes of logits' gradients that StoredHead keeps at most: 4 pairs of 1,024 tokens take 2.5e9
# Configuration keys of models whose head does more than one product; these keep TRL's.
SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


class NllHead(torch.autograd.Function):
    """Sum negative log-likelihood, entropy and correct predictions over tokens.

    hidden: (tokens, width), weight: (vocabulary, width), targets: (tokens). Returns the loss () and (entropy, correct) (2,) in fp32; only
    the loss is differentiable. With `train`, its gradients are computed in the forward, and scaled in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, train: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
        unit = FP16_SCALE if dtype is torch.float16 else 1.0
        of_hidden, of_weight = (train and needed for needed in ctx.needs_input_grad[:2])
        cast = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden, dtype=dtype) if of_hidden else None
        grad_weight = torch.zeros(weight.shape, device=device, dtype=torch.float32) if of_weight else None
        loss, counted = torch.zeros((), device=device), torch.zeros(2, device=device)
        buffer = torch.empty((min(len(hidden), TOKENS), len(weight)), device=device, dtype=dtype)  # reused by all tiles
        for start in range(0, len(hidden), TOKENS):
            tile = slice(start, start + TOKENS)
            rows = hidden[tile].to(dtype)
            logits = torch.mm(rows, cast.t(), out=buffer[: len(rows)])
            nll, entropy, correct, _ = _statistics(logits, targets[tile], (of_hidden or of_weight) and unit)
            loss += nll.sum()
            counted += torch.stack((entropy.sum(), correct.sum()))
            if grad_hidden is not None:  # `logits` hold their own gradient now
                torch.mm(logits, cast, out=grad_hidden[tile])
            if grad_weight is not None:
                trl_kernels._addmm_fp32(grad_weight, logits.t(), rows)
        ctx.grads, ctx.unit = (grad_hidden, grad_weight), unit
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(counted)
        return loss, counted

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        scale = grad / ctx.unit
        scaled = [found if found is None else (found.mul_(scale)).to(dtype) for found, dtype in zip(grads, ctx.dtypes, strict=True)]
        return scaled[0], scaled[1], None, None


class _Stored(torch.autograd.Function):
    """Log-probabilities, entropies, correct predictions and mean logits of targets, each (tokens); gradients of the first are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device = hidden.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden.dtype
        unit = FP16_SCALE if dtype is torch.float16 else 1.0
        cast, rows = weight.to(dtype), hidden.to(dtype)
        of_weight = ctx.needs_input_grad[1]
        kept = torch.empty((len(rows) if of_weight else min(len(rows), TOKENS), len(weight)), device=device, dtype=dtype)
        grad_hidden = torch.empty_like(rows)
        found = []
        for start in range(0, len(rows), TOKENS):
            tile = slice(start, min(start + TOKENS, len(rows)))
            logits = kept[tile] if of_weight else kept[: tile.stop - start]
            torch.mm(rows[tile], cast.t(), out=logits)
            found.append(_statistics(logits, targets[tile], unit))
            torch.mm(logits, cast, out=grad_hidden[tile])
        ctx.save_for_backward(grad_hidden, *((kept, rows) if of_weight else ()))
        ctx.unit, ctx.dtypes = unit, (hidden.dtype, weight.dtype)
        nll, *figures = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.mark_non_differentiable(*figures)
        return -nll, *figures

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, *of_weight = ctx.saved_tensors
        scale = (grad / -ctx.unit)[:, None]  # the kept gradients are those of the negative
        grad_weight = None
        if of_weight:
            kept, rows = of_weight
            grad_weight = torch.mm(kept.t(), (rows * scale).to(rows.dtype)).to(ctx.dtypes[1])
        return (grad_hidden * scale).to(ctx.dtypes[0]), grad_weight, None


class StoredHead:
    """Replace TRL's ChunkedLogProbFunction for losses of log-probabilities alone; other calls go to TRL's."""

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, temperature: float, chunk: int,
        softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        plain = bias is None and softcap is None and temperature == scale == 1.0 and "log_sum_sq_probs" not in outputs
        kept = len(hidden) * len(weight) * 2 if weight.requires_grad else 0
        if not plain or not torch.is_grad_enabled() or not len(hidden) or kept > KEPT:
            arguments = (hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs)
            return trl_kernels.ChunkedLogProbFunction.apply(*arguments)
        log_probs, entropy, correct, mean = _Stored.apply(hidden, weight, targets)
        asked = {"entropy": entropy, "log_sum_sq_probs": None, "mean_logits": mean, "is_top1": correct}
        return log_probs, *(found if name in outputs else None for name, found in asked.items())


def store() -> None:
    """Make the heads that TRL adds to models in this process use StoredHead."""
    trl_utils._ChunkedLogProbFunction = StoredHead


def _statistics(logits: torch.Tensor, targets: torch.Tensor, unit: float | bool) -> tuple[torch.Tensor, ...]:
    """Return (nll, entropy, correct, mean) of each row of `logits`, by TRL's kernels.

    With `unit`, overwrite `logits` with `unit` times d nll / d logits.
    """
    (n, vocabulary), device = logits.shape, logits.device
    triton = trl_kernels._use_triton(device)
    highest, before_target = (torch.full((n,), float("-inf"), device=device) for _ in range(2))
    sums, weighted, squares, added, target = (torch.zeros(n, device=device) for _ in range(5))
    plain = {"logit_scale": 1.0, "softcap": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False, "BLOCK_SIZE": trl_kernels._BLOCK_SIZE}
    fold = trl_kernels._forward_kernel[(n,)] if triton else trl_kernels._forward_tile
    fold(
        logits, logits.stride(0), targets, highest, sums, weighted, squares, added, before_target, target, 0, vocabulary,
        HAS_ENTROPY=True, HAS_LOG_SUM_SQ_PROBS=False, HAS_MEAN_LOGITS=True, HAS_IS_TOP1=True, **plain,
    )  # fmt: skip
    log_z = highest + sums.log()
    if unit:
        blocks = -(-vocabulary // trl_kernels._BLOCK_SIZE)
        unfold = trl_kernels._backward_kernel[(n, blocks)] if triton else trl_kernels._backward_tile
        gradient = torch.full((n,), -float(unit), device=device)
        unfold(
            logits, logits.stride(0), targets, log_z, log_z, gradient, log_z, 0, vocabulary,
            HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, **plain,
        )  # fmt: skip
    return log_z - target, log_z - weighted / sums, (target >= highest) & (target > before_target), added / vocabulary


def fits(model: PreTrainedModel) -> bool:
    """Return whether the head of `model` is just a product of hidden states and a weight."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    return type(head) is nn.Linear and head.bias is None and not any(getattr(config, name, None) for name in SCALED)


@dataclass
class Sums(ModelOutput):
    """The sums of NllHead: `loss` () and `counted` (2,). A bare ModelOutput would lose its attributes under torch.compile."""

    loss: torch.Tensor | None = None
    counted: torch.Tensor | None = None


@dataclass
class LogProbs(ModelOutput):
    """The log-probability of each target, and the entropy where it is predicted: (tokens) each, in fp32."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def sums(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Sums:
    loss, counted = NllHead.apply(hidden, weight, targets, torch.is_grad_enabled())
    return Sums(loss, counted)


def log_probs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, of_entropy: bool) -> LogProbs:
    """Compute them at a temperature. With `of_entropy`, the entropy has a gradient too."""
    function = trl_kernels.ChunkedLogProbFunction if of_entropy else StoredHead
    chunk = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    found, entropy, *_ = function.apply(hidden, weight, None, targets, temperature, chunk, None, 1.0, ("entropy",))
    return LogProbs(found, entropy)


def add(model: PreTrainedModel, compute: Callable[..., ModelOutput] = sums) -> None:
    """Make `model(..., targets=, target_positions=)` return `compute(hidden, weight, targets)` instead of logits.

    target_positions: (targets), where in the flattened batch each target is predicted. The head is computed there only. It stays inside
    the model's forward, where DDP's and FSDP's hooks are.
    """
    whole = model.forward

    @functools.wraps(type(model).forward)  # `generate` inspects its arguments
    def forward(self: PreTrainedModel, *args: Any, targets: Any = None, target_positions: Any = None, **kwargs: Any) -> Any:
        if targets is None:
            return whole(*args, **kwargs)
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        weight = self.get_output_embeddings().weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        picked = hidden.flatten(0, 1).index_select(0, target_positions)
        return compute(picked, weight, targets)

    model.forward = types.MethodType(forward, model)
