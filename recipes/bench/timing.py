"""How long a call takes, as Triton's do_bench and SemiAnalysis measure it: the median of many calls with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

CACHE_BYTES = 256 << 20  # written before each call: as much as the largest cache there is (Infinity Cache of MI300X and MI350X)


def median_ms(call: Callable[[], object], device: torch.device, warmup: int, repetitions: int) -> float:
    """Milliseconds of one call on the device: the median of `repetitions`, after `warmup` calls that count for nothing.

    Calls are queued and timed by events on the device, so what Python costs between them is not in it, as long as the device is the
    slower of the two.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return statistics.median(_wall_ms(call) for _ in range(repetitions))
    cache = torch.empty(CACHE_BYTES // 4, dtype=torch.int32, device=device)  # as do_bench's: the GPU may rest while it is written
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for begin, end in events:
        cache.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def steps_ms(step: Callable[[], object], device: torch.device, warmup: int, steps: int) -> float:
    """Milliseconds of one step of a loop, caches as the loop leaves them: the mean of `steps`, timed as one stretch on the wall clock."""
    for _ in range(warmup):
        step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3 / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wall_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3
