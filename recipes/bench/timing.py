"""Time calls on the device, and define the training step that several benchmarks share."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import nn

from launch.core.errors import UserError
from recipes.rank.device import DTYPES, memory_peak_gb

Step = Callable[..., torch.Tensor]
# Bytes to overwrite before each call: the size of the largest cache, MI300X's Infinity Cache.
CACHE_BYTES = 256 << 20
# Small, because every step trains on the same batch, and an overflow would change the timings.
LEARNING_RATE = 1e-5


def weights_dtype(config: DictConfig) -> torch.dtype:
    """Return the dtype of weights, gradients and moments. Raise UserError for nf4 and fp8."""
    precision = config.precision
    if not {precision.weights, precision.compute} <= {*DTYPES}:
        raise UserError(
            f"precision={precision.name}: this benchmark only trains in {', '.join(DTYPES)}. "
            "Use precision=bf16. For fp8, use method=bench/finetune."
        )
    return DTYPES[precision.weights]


def numerics(config: DictConfig) -> str:
    """Return a description of the dtypes for the note of a table."""
    compute, weights = config.precision.compute, config.precision.weights
    autocast = ", autocast" if compute != weights else ""
    return f"{compute} products, {weights} weights, gradients and moments{autocast}"


def autocast(config: DictConfig) -> torch.dtype | None:
    """Return the dtype to autocast to, or None if it equals the dtype of the weights."""
    compute = DTYPES[config.precision.compute]
    return compute if compute != weights_dtype(config) else None


def training_step(
    model: nn.Module,
    compute: torch.dtype | None,
    learning_rate: float = LEARNING_RATE,
    max_norm: float | None = None,
    loss_of: Callable[..., torch.Tensor] | None = None,
) -> Step:
    """Return a function that trains one step with AdamW and returns the loss.

    The loss is `loss_of(*inputs)`, by default `model(*inputs)`, under autocast to `compute` unless
    it is None. If `max_norm` is set, gradients are clipped and an fp16 loss is scaled. Otherwise
    only the time matters, so an fp16 loss is not scaled.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)
    device, loss_of = parameters[0].device.type, loss_of or model
    is_scaled = max_norm is not None and compute == torch.float16
    scaler = torch.amp.GradScaler(device, enabled=is_scaled)

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, compute, enabled=compute is not None):
            loss = loss_of(*inputs)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def time_steps(step: Step, device: torch.device, warmup: int, steps: int) -> dict[str, float]:
    """Return milliseconds per step (`ms`), peak memory in GB (`memory_gb`), and the last `loss`.

    The loss shows whether the training stayed finite.
    """
    losses: deque[torch.Tensor] = deque(maxlen=1)
    ms = steps_ms(lambda: losses.append(step()), device, warmup, steps)
    # The loss is read after timing, because reading it waits for the GPU.
    return {"ms": ms, "memory_gb": memory_peak_gb(), "loss": losses[0].item()}


def median_ms(
    call: Callable[[], object], device: torch.device, warmup: int, repetitions: int
) -> float:
    """Return the median milliseconds of `repetitions` calls, after `warmup` untimed calls.

    Caches are cold, as in Triton's do_bench and in SemiAnalysis' measurements. Calls are queued and
    timed by events, which excludes Python's overhead unless Python is slower than the device.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return statistics.median(steps_ms(call, device, 0, 1) for _ in range(repetitions))
    # Like do_bench, overwrite the cache before each call.
    cache = torch.empty(CACHE_BYTES // 4, dtype=torch.int32, device=device)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repetitions)
    ]
    for begin, end in events:
        cache.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def steps_ms(step: Callable[[], object], device: torch.device, warmup: int, steps: int) -> float:
    """Return the mean milliseconds of a step, from the wall-clock time of all `steps`."""
    for _ in range(warmup):
        step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_leftovers() -> None:
    """Free memory and compiled code of earlier cases, and reset the peak memory."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()  # otherwise Dynamo stops compiling a function after eight shapes
    if torch.cuda.is_initialized():
        gc.collect()  # reference cycles hold tensors of an interrupted backward pass
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
