"""What the benchmarks of training share: numerics, the optimizer, one step, and what it gave."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from recipes.bench.timing import steps_ms
from recipes.common.device import DTYPES, memory_peak_gb
from recipes.common.errors import UserError

Step = Callable[[], torch.Tensor]
# Small: the batch is the same in every step, and a loss that overflows would be measured with other values than training has.
LEARNING_RATE = 1e-5


def weights_dtype(config: DictConfig) -> torch.dtype:
    """Of the parameters, their gradients and both moments. Raises UserError for nf4 and fp8, which these loops do not have."""
    precision = config.precision
    if precision.weights not in DTYPES:
        raise UserError(f"precision.weights={precision.weights}: this loop trains every weight. Use precision.weights=bf16 or fp32.")
    if precision.compute not in DTYPES:
        raise UserError(f"precision={precision.name}: this loop has no {precision.compute} products; method=bench/finetune has.")
    return DTYPES[precision.weights]


def numerics(config: DictConfig) -> str:
    """For a table's note: what is computed in, and whether by autocast."""
    compute, weights = config.precision.compute, config.precision.weights
    return f"{compute} products, {weights} weights, gradients and moments" + (", autocast" if compute != weights else "")


def training_step(model: nn.Module, inputs: Sequence[torch.Tensor], config: DictConfig) -> Step:
    """A step of AdamW on `model(*inputs)`, which is its loss; under autocast where precision.compute is not what the weights are kept in.

    A fp16 loss is not scaled: nothing is learnt here, and scaling costs next to nothing.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)
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
    """Milliseconds of a step, the most memory since `fresh`, and the last loss, which says whether the numbers were finite."""
    last: list[torch.Tensor] = []

    def kept() -> None:
        last[:] = [step()]  # read after the clock has stopped: reading waits for the GPU

    ms = steps_ms(kept, device, warmup, steps)
    return {"ms": ms, "memory_gb": memory_peak_gb(), "loss": last[0].item()}


def fresh(device: torch.device) -> None:
    """Give back what an earlier row held (modules and autograd refer to themselves in circles), and count memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def check_tuples(name: str, tuples: Sequence[Any], *parts: str) -> None:
    """Raises UserError where one of `tuples` is not a list of whole numbers above 0, one for each of `parts`."""
    for one in tuples:
        numbers = isinstance(one, Sequence) and len(one) == len(parts) and all(isinstance(part, int) and part > 0 for part in one)
        if not numbers:
            raise UserError(f"method.args.{name}: {one}: a list of [{', '.join(parts)}] is expected, each at least 1: [[...], [...]].")
