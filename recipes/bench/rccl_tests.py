"""Run RCCL's benchmark programs if installed (package rccl-tests; nccl-tests has the same ones)."""

from __future__ import annotations

import shutil

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "broadcast": "broadcast_perf",
}
DTYPES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16"}


def installed(op: str) -> bool:
    return shutil.which(PROGRAMS[op]) is not None


def argv(
    op: str, dtype: str, ranks: int, sizes: tuple[int, int, int], warmup: int, repetitions: int
) -> list[str]:
    """Return a command that runs one process with a thread for each GPU, so it needs no MPI.

    `sizes`: the first and the last in bytes, and the factor from one to the next.
    """
    first, last, factor = sizes
    series = f"-b {first} -e {last} -f {factor} -t {ranks} -g 1"
    return f"{PROGRAMS[op]} {series} -d {DTYPES[dtype]} -w {warmup} -n {repetitions}".split()


def parse(text: str) -> dict[int, tuple[float, int]]:
    """Return size in bytes -> (milliseconds of a call, wrong elements), both out of place.

    A row is: size, count, type, reduction, root, then time in microseconds, algorithm bandwidth,
    bus bandwidth and wrong elements, first out of place, then in place. Wrong elements are N/A if
    they were not counted.
    """
    rows = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 13 and words[0].isdigit():
            us, wrong = words[5], words[8]
            rows[int(words[0])] = (float(us) / 1e3, int(float(wrong)) if wrong != "N/A" else 0)
    return rows
