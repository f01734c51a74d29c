"""Define the results that recipes/measure/health.py writes per GPU, and the outcome of a test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Results of one GPU, or of one process on a CPU. None means not measured."""

    rank: int
    phase: str  # the last phase that the process reached
    torch: str
    num_gpus: int  # seen by torch
    dtype: str
    product: str = ""
    not_measured: str | None = None  # why this GPU was not measured
    memory_free_gb: float | None = None
    memory_total_gb: float | None = None
    gemm_tflops: float | None = None
    # Largest error, in standard deviations of an entry. If a rate was measured, None means an error
    # that is not finite.
    gemm_error: float | None = None
    fp32_output_tflops: float | None = None
    fp32_output_error: float | None = None  # like gemm_error
    fp32_output_refused: str | None = None  # torch's error
    copy_gb_s: float | None = None  # bytes read plus bytes written
    multiply_gb_s: float | None = None  # by a kernel that reads, multiplies and writes
    clocks_mhz: list[int] | None = None  # of each die under load (AMD only)
    clocks_unknown: str | None = None
    all_reduce_wrong: int | None = None  # number of wrong elements
    # Bus bandwidth as in nccl-tests: 2 (n - 1) / n bytes per reduced byte.
    all_reduce_gb_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    gpus: tuple[int, ...] = ()  # index of each process's GPU among the vendor's; empty on a CPU
    measured: tuple[Measured, ...] = ()
    seconds: float = 0.0
    failed: tuple[str, str] | None = None  # the error, and how to see more
    not_run: tuple[str, str] | None = None  # the reason, and the remedy
