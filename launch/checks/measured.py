"""Define what recipes/measure/health.py writes about each GPU, and the outcome of running it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Results of one GPU, or of one process on a CPU. None means not measured."""

    rank: int
    phase: str  # the last phase that it reached
    torch: str
    num_gpus: int  # seen by torch
    dtype: str
    product: str = ""
    not_measured: str | None = None  # why this GPU was not measured
    memory_free_gb: float | None = None
    memory_total_gb: float | None = None
    gemm_tflops: float | None = None
    # Largest error, in standard deviations of an entry. None with a rate means not finite.
    gemm_error: float | None = None
    fp32_output_tflops: float | None = None
    fp32_output_error: float | None = None  # likewise
    fp32_output_refused: str | None = None  # torch's error
    copy_gb_s: float | None = None  # read and written
    multiply_gb_s: float | None = None  # by a kernel that reads, multiplies and writes
    clocks_mhz: list[int] | None = None  # of each die (AMD), under load
    clocks_unknown: str | None = None
    all_reduce_wrong: int | None = None  # elements
    # Bus bandwidth as in nccl-tests: 2 (n - 1) / n bytes per reduced byte.
    all_reduce_gb_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Outcome of the active tests.

    `failed` holds the error and how to see more. `not_run` is why nothing was started, and the
    fix.
    """

    gpus: tuple[int, ...] = ()  # index of each process's GPU, as the vendor counts; empty on a CPU
    measured: tuple[Measured, ...] = ()
    seconds: float = 0.0
    failed: tuple[str, str] | None = None
    not_run: tuple[str, str] | None = None
