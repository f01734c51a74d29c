"""Train a model on one batch: its numerics, its optimizer, one step and the timing of steps."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Sequence

import torch
from omegaconf import DictConfig
from torch import nn

from launch.core.errors import UserError
from recipes.bench.timing import steps_ms
from recipes.rank.device import DTYPES, memory_peak_gb

Step = Callable[[], torch.Tensor]
# Small, because every step has the same batch, and an overflow would change the timings.
LEARNING_RATE = 1e-5


def weights_dtype(config: DictConfig) -> torch.dtype:
    """Return the dtype of parameters, gradients and moments. Raise UserError for nf4 and fp8."""
    precision = config.precision
    if not {precision.weights, precision.compute} <= {*DTYPES}:
        raise UserError(
            f"precision={precision.name}: this loop computes and trains in {', '.join(DTYPES)}. "
            "Use precision=bf16; or method=bench/finetune for fp8."
        )
    return DTYPES[precision.weights]


def numerics(config: DictConfig) -> str:
    """Return a description of the dtypes for a table's note."""
    compute, weights = config.precision.compute, config.precision.weights
    autocast = ", autocast" if compute != weights else ""
    return f"{compute} products, {weights} weights, gradients and moments{autocast}"


def training_step(model: nn.Module, inputs: Sequence[torch.Tensor], config: DictConfig) -> Step:
    """Return a function that takes a step of AdamW on the loss `model(*inputs)` and returns it.

    It autocasts if precision.compute differs from the weights. An fp16 loss is not scaled, because
    nothing is learned here and scaling takes almost no time.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    compute, weights = DTYPES[config.precision.compute], weights_dtype(config)
    device = inputs[0].device.type

    def step() -> torch.Tensor:
        with torch.autocast(device, dtype=compute, enabled=compute != weights):
            loss = model(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def timed(step: Step, device: torch.device, warmup: int, steps: int) -> dict[str, float]:
    """Return milliseconds per step, peak memory of this case, and the last loss.

    The loss shows whether the numbers stayed finite.
    """
    losses: deque[torch.Tensor] = deque(maxlen=1)
    ms = steps_ms(lambda: losses.append(step()), device, warmup, steps)
    # Read after the clock has stopped, since reading waits for the GPU.
    return {"ms": ms, "memory_gb": memory_peak_gb(), "loss": losses[0].item()}


def fresh() -> None:
    """Free what an earlier case left, including compiled code, and reset the peak memory."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()  # it also stops compiling a function after eight shapes
    if torch.cuda.is_initialized():
        gc.collect()  # reference cycles keep tensors of an interrupted backward pass
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
