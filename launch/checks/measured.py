"""What recipes/health/measure.py has written of each GPU, and how running it went."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """One GPU (or one process on a CPU). Units and meanings stand in recipes/health/measure.py; None is not measured."""

    rank: int
    phase: str  # in which it was last
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
    """`failed`: what went wrong, and how to see more. `not_run`: why nothing was started, and the cure."""

    gpus: tuple[int, ...] = ()  # index of each process's GPU, as the maker counts; empty on a CPU
    measured: tuple[Measured, ...] = ()
    seconds: float = 0.0
    failed: tuple[str, str] | None = None
    not_run: tuple[str, str] | None = None


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def read(file: Path) -> Measured:
    """Raises OSError where it is not there, ValueError where it is not whole."""
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file.name} is not whole: {error}") from error
    names = {field.name for field in dataclasses.fields(Measured)}
    if not isinstance(found, dict) or set(found) != names:
        odd = sorted(names ^ set(found)) if isinstance(found, dict) else [type(found).__name__]
        raise ValueError(f"{file.name} is not what this doctor reads: {', '.join(odd)}")
    return Measured(**found)
