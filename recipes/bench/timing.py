"""Time calls as Triton's do_bench and SemiAnalysis do: the median of many, with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# Bytes to write before each call: the largest cache, the Infinity Cache of MI300X and MI350X.
CACHE_BYTES = 256 << 20


def median_ms(
    call: Callable[[], object], device: torch.device, warmup: int, repetitions: int
) -> float:
    """Return the median milliseconds of a call on the device, after `warmup` untimed calls.

    Calls are queued and timed by events on the device. So Python's overhead is excluded as long as
    the device is slower than Python.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return statistics.median(steps_ms(call, device, 0, 1) for _ in range(repetitions))
    # As in do_bench, the cache is overwritten before each call; compute units may idle meanwhile.
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
    """Return the mean milliseconds of a step, from the wall-clock time of the whole loop."""
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
