"""What each GPU of this machine does: right products, how fast, memory, all-reduce. One process a GPU; no model, no TRL.

Started by `python launch/doctor.py active=true`, which judges what is written. By hand, on one GPU and on eight:

    python -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 1 -m recipes.health.measure --folder measured
    python -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 8 -m recipes.health.measure --folder measured

Writes FOLDER/rank<RANK>.json anew before each phase, so that what a process did before it died or hung is there. All GPUs are loaded at the
same time, as training loads them: they share power and air. It takes about 8 s of each, and less than 4 GB.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from recipes.common.files import write_json
from recipes.health import clocks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_USED = 0.10  # of a GPU's memory: more is somebody's, who would be slowed down, and so would what we measure
NEEDED_GB = 4.0  # three matrices, two copies or three buffers at a time, and what the libraries take
JOIN_S = 120.0  # for the slowest process to have imported torch; launch/checks/measuring.py gives up sooner or later by its own clock
SAMPLED = 64  # rows and columns of a product that are computed again


@dataclass(frozen=True)
class Sizes:
    matrix: int  # rows and columns
    copied: int  # bytes; more than any cache (256 MB on CDNA 3 and later)
    reduced: int  # bytes
    load_s: float  # how long products are computed: clocks and power need a second to settle


SIZES = {"cuda": Sizes(8192, 1 << 30, 1 << 29, 3.0), "cpu": Sizes(256, 1 << 24, 1 << 20, 0.1)}


@dataclass
class Measurement:
    """Read by launch/checks/measured.py, which names the same fields. None: not measured."""

    rank: int
    phase: str = "start"
    product: str = ""
    torch: str = torch.__version__
    num_gpus: int = 0  # that torch sees
    dtype: str = ""
    not_measured: str | None = None  # why this GPU was left alone
    memory_free_gb: float | None = None
    memory_total_gb: float | None = None
    gemm_tflops: float | None = None
    gemm_error: float | None = None  # as `error` says; None with a rate: not finite
    fp32_output_tflops: float | None = None
    fp32_output_error: float | None = None  # None with a rate: not finite
    fp32_output_refused: str | None = None  # what torch said
    copy_gb_s: float | None = None  # read and written
    multiply_gb_s: float | None = None  # by a kernel that reads, multiplies and writes
    clocks_mhz: list[int] | None = None  # of each die (AMD), under load
    clocks_unknown: str | None = None
    all_reduce_wrong: int | None = None  # elements
    all_reduce_gb_s: float | None = None  # bus bandwidth as nccl-tests define it: 2 (n - 1) / n bytes a byte reduced


class Rank:
    """One process and its device."""

    def __init__(self, device: str, dtype: str, folder: Path, force: bool) -> None:
        self.number, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device, self.sizes = torch.device(device, self.number) if device == "cuda" else torch.device(device), SIZES[device]
        self.dtype, self.force = DTYPES[dtype], force
        self.file = folder / f"rank{self.number}.json"
        self.found = Measurement(self.number, num_gpus=torch.cuda.device_count(), dtype=dtype)

    def phase(self, name: str) -> None:
        self.found.phase = name
        write_json(self.file, asdict(self.found))
        if self.number == 0:
            print(name, flush=True)  # launch/doctor.py shows it

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def why_not(self) -> str | None:
        """Why this GPU is left alone. Takes note of its memory."""
        if self.device.type == "cpu":
            return None
        if self.found.num_gpus <= self.number:
            return f"torch {torch.__version__} sees {self.found.num_gpus} GPU(s)"
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.found.product = properties.name
        free, total = (size / 1e9 for size in torch.cuda.mem_get_info(self.device))
        self.found.memory_free_gb, self.found.memory_total_gb = free, total
        shared = bool(getattr(properties, "is_integrated", False))  # the system's memory, which others use by right
        return unusable(free, total, self.force or shared)


def unusable(free_gb: float, total_gb: float, force: bool) -> str | None:
    """Why a GPU with so much memory free is left alone."""
    if free_gb < NEEDED_GB:
        return f"memory is short: {free_gb:.1f} of {total_gb:.0f} GB are free, and {NEEDED_GB:g} are needed"
    if total_gb - free_gb > MOST_USED * total_gb and not force:
        return f"it is in use: {total_gb - free_gb:.1f} of {total_gb:.0f} GB are taken"
    return None


def together(ready: bool) -> bool:
    """Whether every process is: it is where they wait for each other, on the CPU."""
    flag = torch.tensor(int(ready))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def call_s(rank: Rank, call: Callable[[], object], load_s: float, meanwhile: Callable[[], None] = lambda: None) -> float:
    """Seconds a call takes: the median of rounds of a fifth of `load_s`. `meanwhile` is done in each, while the device computes."""
    for _ in range(2):  # libraries load kernels in the first, clocks rise
        call()
    rank.synchronize()
    began = time.perf_counter()
    call()
    rank.synchronize()
    calls = max(1, min(1000, int(load_s / 5 / (time.perf_counter() - began))))
    return statistics.median(_round_s(rank, call, calls, meanwhile) for _ in range(5))


def _round_s(rank: Rank, call: Callable[[], object], calls: int, meanwhile: Callable[[], None] = lambda: None) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    meanwhile()
    rank.synchronize()
    return (time.perf_counter() - began) / calls


def error(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Largest difference to float64 on a grid over the whole product, in standard deviations of an entry, sqrt(K) for normal a and b.

    None where not every entry is finite.
    """
    if not torch.isfinite(product).all():
        return None
    step = max(1, len(a) // SAMPLED)
    exact = a[::step].double() @ b[:, ::step].double()
    return float((product[::step, ::step].double() - exact).abs().max()) / len(b) ** 0.5


def measure_gemm(rank: Rank) -> None:
    """Products in `dtype`, then with fp32 output as TRL's chunked loss asks for them (trl.kernels.chunked_logprob._addmm_fp32)."""
    size = rank.sizes.matrix
    generator = torch.Generator(rank.device).manual_seed(rank.number)
    # Normal, not zeros: zeros take less power, and clocks rise above what training sees (894 against 788 TFLOPS on an H200).
    a, b = (torch.randn(size, size, device=rank.device, generator=generator).to(rank.dtype) for _ in range(2))
    product = torch.empty_like(a)
    sampled: list[list[int]] = []
    seconds = call_s(rank, lambda: torch.mm(a, b, out=product), rank.sizes.load_s, lambda: _sample_clocks(rank, sampled))
    found = rank.found
    found.gemm_tflops = 2 * size**3 / seconds / 1e12
    found.gemm_error = error(product, a, b)
    found.clocks_mhz = [int(statistics.median(die)) for die in zip(*sampled, strict=True)] or None
    if rank.device.type == "cpu" or rank.dtype == torch.float32:
        return  # torch has it for halves on GPUs only, and TRL asks for it there only
    rank.phase("GEMM with fp32 output")
    output = torch.zeros(size, size, device=rank.device)
    try:
        torch.addmm(output, a, b, out_dtype=torch.float32, out=output)
        found.fp32_output_error = error(output, a, b)
        seconds = call_s(rank, lambda: torch.mm(a, b, out_dtype=torch.float32), rank.sizes.load_s / 3)
        found.fp32_output_tflops = 2 * size**3 / seconds / 1e12
    except (RuntimeError, TypeError) as refusal:  # TypeError: torch before 2.8 does not know the argument
        found.fp32_output_refused = str(refusal).strip().splitlines()[0]


def _sample_clocks(rank: Rank, sampled: list[list[int]]) -> None:
    if torch.version.hip is None or rank.found.clocks_unknown:
        return
    try:
        properties = torch.cuda.get_device_properties(rank.device)
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        sampled.append(clocks.of_device(address))
    except (OSError, ValueError, AttributeError) as reason:  # AttributeError: this torch does not name the address
        rank.found.clocks_unknown = str(reason)


def measure_copy(rank: Rank) -> None:
    """Bytes read and written: by torch's copy, and by a kernel as BabelStream's `Mul`. On ROCm they take different ways."""
    source = torch.ones(rank.sizes.copied // 4, device=rank.device)
    target = torch.empty_like(source)
    for name, call in (("copy_gb_s", lambda: target.copy_(source)), ("multiply_gb_s", lambda: torch.mul(source, 2.0, out=target))):
        setattr(rank.found, name, 2 * rank.sizes.copied / call_s(rank, call, rank.sizes.load_s / 4) / 1e9)


def measure_all_reduce(rank: Rank) -> None:
    """A sum that every element has its own share in, exact in fp32, then its speed. The number of calls is the same everywhere."""
    pattern = torch.arange(64.0, device=rank.device).repeat(rank.sizes.reduced // 4 // 64)
    buffer = pattern * (rank.number + 1)
    dist.all_reduce(buffer)
    rank.found.all_reduce_wrong = int((buffer != pattern * (rank.world * (rank.world + 1) // 2)).sum())
    buffer.zero_()  # sums that stay what they are
    for _ in range(3):
        dist.all_reduce(buffer)
    rank.synchronize()
    seconds = statistics.median(_round_s(rank, lambda: dist.all_reduce(buffer), 10) for _ in range(3))
    rank.found.all_reduce_gb_s = 2 * (rank.world - 1) / rank.world * rank.sizes.reduced / seconds / 1e9


def run(rank: Rank) -> None:
    rank.phase("start")
    backend = "cpu:gloo,cuda:nccl" if rank.device.type == "cuda" and rank.found.num_gpus else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=JOIN_S))
    rank.found.not_measured = rank.why_not()
    usable = rank.found.not_measured is None
    complete = together(usable)
    for name, measure in (("GEMM", measure_gemm), ("copy", measure_copy), ("all-reduce", measure_all_reduce)):
        rank.phase(name)
        together(usable)  # all begin at once
        if usable and (measure is not measure_all_reduce or (complete and rank.world > 1)):
            measure(rank)
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
    rank.phase("done")
    together(True)  # the first to end would have torchrun stop the others


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this process's GPU; launch/doctor.py active=true starts one a GPU.")
    parser.add_argument("--folder", type=Path, required=True, help="where rank<RANK>.json is written")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--force", action="store_true", help="GPUs that others use too")
    given = parser.parse_args()
    run(Rank(given.device, given.dtype, given.folder, given.force))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort one interpreter in six that ends by itself (recipes/common/program.py)


if __name__ == "__main__":
    main()
