"""Define what recipes/measure/health.py writes about each GPU, and the outcome of running it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Results of one GPU, or of one process on a CPU.

    recipes/measure/health.py has units and meanings. None means not measured.
    """

    rank: int
    phase: str  # the last one that it reached
    product: str
    torch: str
    num_gpus: int
    dtype: str
    not_measured: str | None
    memory_free_gb: float | None
    memory_total_gb: float | None
    gemm_tflops: float | None
    gemm_error: float | None
    fp32_output_tflops: float | None
    fp32_output_error: float | None
    fp32_output_refused: str | None
    copy_gb_s: float | None
    multiply_gb_s: float | None
    clocks_mhz: list[int] | None
    clocks_unknown: str | None
    all_reduce_wrong: int | None
    all_reduce_gb_s: float | None


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
