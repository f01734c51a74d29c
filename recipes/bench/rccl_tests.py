"""RCCL's own benchmark programs (package rccl-tests; nccl-tests has the same), driven where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from recipes.common.errors import UserError

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


def argv(op: str, dtype: str, ranks: int, sizes: tuple[int, int, int], warmup: int, repetitions: int) -> list[str]:
    """`sizes`: first, last (bytes) and the factor between. One process with a thread for each GPU: it needs no MPI."""
    first, last, factor = map(str, sizes)
    return [
        *[PROGRAMS[op], "-b", first, "-e", last, "-f", factor, "-t", str(ranks), "-g", "1"],
        *["-d", DTYPES[dtype], "-w", str(warmup), "-n", str(repetitions)],
    ]


def measure(command: list[str], env: Mapping[str, str], timeout_s: float) -> dict[int, tuple[float, int]]:
    """What `parse` finds. Raises UserError where the program fails or takes longer than `timeout_s`."""
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as expired:
        raise UserError(f"{command[0]}: no end after {timeout_s:g} s") from expired
    rows = parse(done.stdout)
    if not rows:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise UserError(f"{command[0]} measured nothing (exit code {done.returncode}): {' '.join(last) or 'it said nothing'}")
    return rows


def parse(text: str) -> dict[int, tuple[float, int]]:
    """Bytes -> milliseconds of one call, and wrong elements, of the out-of-place half.

    A row is: size, count, type, reduction, root, then time in microseconds, algorithm and bus bandwidth and wrong elements twice,
    out of place and in place. Wrong elements are N/A where they were not counted.
    """
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 13 and words[0].isdigit():
            us, wrong = words[5], words[8]
            found[int(words[0])] = (float(us) / 1e3, int(float(wrong)) if wrong != "N/A" else 0)
    return found
