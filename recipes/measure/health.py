"""Measure each GPU of this machine: correct products, speed, memory, all-reduce.

`python launch/doctor.py active=true` starts one process per GPU and judges the results. To start
the processes by hand, with the number of GPUs in place of N:

    python -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node N \\
        -m recipes.measure.health --folder measured

FOLDER/rank<RANK>.json is rewritten before each phase, so it shows the phase where a process died or
hung. launch/checks/measured.py describes its keys. All GPUs are loaded together, as in training,
since they share power and cooling. A phase takes about 8 s and less than 4 GB.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.core.json_files import write_json
from recipes.measure import clocks
from recipes.rank.device import DTYPES, pci_address
from recipes.rank.ranks import all_ranks

# If more of the memory is in use, someone else uses the GPU, and both would be slowed down.
MAX_USED = 0.10
# Three matrices, two copies or three buffers, and the memory of libraries.
NEEDED_GB = 4.0
# For the slowest process to import torch. launch/checks/measuring.py has another deadline.
JOIN_S = 120.0
NUM_CHECKED = 64  # rows and columns of a product that are recomputed


@dataclass(frozen=True)
class Sizes:
    matrix: int  # rows and columns
    copied: int  # bytes; more than any cache (256 MB on CDNA 3 and later)
    reduced: int  # bytes
    load_s: float  # clocks and power need a second to settle


SIZES = {"cuda": Sizes(8192, 1 << 30, 1 << 29, 3.0), "cpu": Sizes(256, 1 << 24, 1 << 20, 0.1)}


class Rank:
    """Hold one process's device, sizes and measurement."""

    def __init__(self, device: str, dtype: str, folder: Path, force: bool) -> None:
        self.number, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device(f"cuda:{self.number}" if device == "cuda" else device)
        self.sizes = SIZES[device]
        self.dtype, self.force = DTYPES[dtype], force
        self.file = folder / f"rank{self.number}.json"
        self.num_gpus = torch.cuda.device_count()  # seen by torch
        self.measured: dict[str, Any] = {
            "rank": self.number,
            "torch": torch.__version__,
            "num_gpus": self.num_gpus,
            "dtype": dtype,
        }

    def phase(self, name: str) -> None:
        self.measured["phase"] = name
        write_json(self.file, self.measured)
        if self.number == 0:
            print(name, flush=True)  # shown by launch/doctor.py

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reason_to_skip(self) -> str | None:
        """Record the GPU's memory. Return the reason not to measure the GPU, or None."""
        if self.device.type == "cpu":
            return None
        if self.num_gpus <= self.number:
            return f"torch {torch.__version__} sees {self.num_gpus} GPU(s)"
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        free, total = (size / 1e9 for size in torch.cuda.mem_get_info(self.device))
        sizes = {"memory_free_gb": free, "memory_total_gb": total}
        self.measured |= {"product": properties.name, **sizes}
        # An integrated GPU shares memory with the system, so other use is normal.
        shared = bool(getattr(properties, "is_integrated", False))
        return unusable_reason(free, total, self.force or shared)


def unusable_reason(free_gb: float, total_gb: float, force: bool) -> str | None:
    """Return the reason not to measure a GPU with this much free memory, or None."""
    if free_gb < NEEDED_GB:
        return (
            f"memory is short: {free_gb:.1f} of {total_gb:.0f} GB are free, "
            f"but {NEEDED_GB:g} GB are needed"
        )
    if total_gb - free_gb > MAX_USED * total_gb and not force:
        return f"it is in use: {total_gb - free_gb:.1f} of {total_gb:.0f} GB are taken"
    return None


def call_s(
    rank: Rank,
    call: Callable[[], object],
    load_s: float,
    meanwhile: Callable[[], None] = lambda: None,
    calls: int | None = None,
) -> float:
    """Return the seconds of a call, as the median of five rounds of `calls`.

    Without `calls`, a round lasts a fifth of `load_s`. Each round runs `meanwhile` on the host
    while the device computes.
    """
    for _ in range(2):  # load the kernels and let clocks rise
        call()
    rank.synchronize()
    start = time.perf_counter()
    call()
    rank.synchronize()
    calls = calls or max(1, min(1000, int(load_s / 5 / (time.perf_counter() - start))))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        meanwhile()
        rank.synchronize()
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds)


def error(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the largest error of a @ b on a grid of entries, or None if an entry is not finite.

    The unit is the standard deviation of an entry, sqrt(K) for normal a and b. The reference is
    computed in float64.
    """
    if not torch.isfinite(product).all():
        return None
    step = max(1, len(a) // NUM_CHECKED)
    exact = a[::step].double() @ b[:, ::step].double()
    return float((product[::step, ::step].double() - exact).abs().max()) / len(b) ** 0.5


def measure_gemm(rank: Rank) -> None:
    """Measure products in `dtype`, then with fp32 output as in TRL's chunked loss.

    Source: trl.kernels.chunked_logprob._addmm_fp32.
    """
    size = rank.sizes.matrix
    generator = torch.Generator(rank.device).manual_seed(rank.number)
    # Normal values, since zeros take less power and let clocks rise (894 against 788 TFLOPS, H200).
    a, b = (
        torch.randn(size, size, device=rank.device, generator=generator).to(rank.dtype)
        for _ in range(2)
    )
    product = torch.empty_like(a)
    measured, samples = rank.measured, list[list[int]]()

    def sample_clocks() -> None:
        if torch.version.hip is None or "clocks_unknown" in measured:
            return
        try:
            samples.append(clocks.die_clocks(pci_address(rank.device) or "unknown"))
        except (OSError, ValueError) as error:
            measured["clocks_unknown"] = str(error)

    seconds = call_s(rank, lambda: torch.mm(a, b, out=product), rank.sizes.load_s, sample_clocks)
    measured["gemm_tflops"] = 2 * size**3 / seconds / 1e12
    measured["gemm_error"] = error(product, a, b)
    measured["clocks_mhz"] = [
        int(statistics.median(die)) for die in zip(*samples, strict=True)
    ] or None
    if rank.device.type == "cpu" or rank.dtype == torch.float32:
        return  # torch supports fp32 output only for 16-bit inputs on GPUs
    rank.phase("GEMM with fp32 output")
    output = torch.zeros(size, size, device=rank.device)
    try:
        torch.addmm(output, a, b, out_dtype=torch.float32, out=output)
        measured["fp32_output_error"] = error(output, a, b)
        seconds = call_s(
            rank, lambda: torch.mm(a, b, out_dtype=torch.float32), rank.sizes.load_s / 3
        )
        measured["fp32_output_tflops"] = 2 * size**3 / seconds / 1e12
    except (RuntimeError, TypeError) as failure:
        # TypeError: torch before 2.8 does not have the argument.
        measured["fp32_output_refused"] = str(failure).strip().splitlines()[0]


def measure_copy(rank: Rank) -> None:
    """Measure GB/s read and written by torch's copy, and by a kernel like BabelStream's `Mul`.

    On ROCm, the two use different code paths.
    """
    source = torch.ones(rank.sizes.copied // 4, device=rank.device)
    target = torch.empty_like(source)
    load_s, gigabytes = rank.sizes.load_s / 4, 2 * rank.sizes.copied / 1e9
    rank.measured["copy_gb_s"] = gigabytes / call_s(rank, lambda: target.copy_(source), load_s)
    multiply_s = call_s(rank, lambda: torch.mul(source, 2.0, out=target), load_s)
    rank.measured["multiply_gb_s"] = gigabytes / multiply_s


def measure_all_reduce(rank: Rank) -> None:
    """Check a sum that is exact in fp32 and differs by element, then measure its speed.

    The number of calls must be the same on every rank.
    """
    pattern = torch.arange(64.0, device=rank.device).repeat(rank.sizes.reduced // 4 // 64)
    buffer = pattern * (rank.number + 1)
    dist.all_reduce(buffer)
    rank.measured["all_reduce_wrong"] = int(
        (buffer != pattern * (rank.world * (rank.world + 1) // 2)).sum()
    )
    buffer.zero_()  # keep repeated sums finite
    seconds = call_s(rank, lambda: dist.all_reduce(buffer), rank.sizes.load_s, calls=10)
    rank.measured["all_reduce_gb_s"] = (
        2 * (rank.world - 1) / rank.world * rank.sizes.reduced / seconds / 1e9
    )


def run(rank: Rank) -> None:
    rank.phase("start")
    backend = "cpu:gloo,cuda:nccl" if rank.device.type == "cuda" and rank.num_gpus else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=JOIN_S))
    rank.measured["not_measured"] = reason = rank.reason_to_skip()
    usable = reason is None
    complete = all_ranks(usable)
    for name, measure in (
        ("GEMM", measure_gemm),
        ("copy", measure_copy),
        ("all-reduce", measure_all_reduce),
    ):
        rank.phase(name)
        all_ranks(usable)  # a barrier, so that all ranks begin together
        if usable and (measure is not measure_all_reduce or (complete and rank.world > 1)):
            measure(rank)
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
    rank.phase("done")
    all_ranks(True)  # torchrun stops the others when the first rank ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure this process's GPU; launch/doctor.py active=true starts one per GPU."
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="where rank<RANK>.json is written"
    )
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--force", action="store_true", help="also measure GPUs that are in use")
    args = parser.parse_args()
    run(Rank(args.device, args.dtype, args.folder, args.force))
    sys.stdout.flush()
    sys.stderr.flush()
    # With gloo's threads, one normal exit in six aborts (recipes/rank/program.py).
    os._exit(0)


if __name__ == "__main__":
    main()
