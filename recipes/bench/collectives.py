"""Measure collective operations between GPUs by size, number of ranks and settings of RCCL (NCCL).

As in nccl-tests (doc/PERFORMANCE.md), 20 calls are timed together after 5 untimed calls. Algorithm
bandwidth is size divided by time. Bus bandwidth is algorithm bandwidth times the share of the array
that a rank must send under any algorithm, so it can be compared with the links. Each set of
environment variables is measured in new processes (recipes/bench/collective_rank.py). Times of
torch include its cost on the host, which matters for small sizes. Times of rccl-tests do not.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from launch.core.errors import UserError
from recipes.bench.benchmark import (
    OUT_OF_MEMORY,
    Row,
    SeriesConfig,
    Table,
    device_of,
    grid,
    measure,
    parse_output,
)
from recipes.bench.collective_variables import check_variables
from recipes.bench.consensus import free_port, gather_results
from recipes.rank.device import DTYPES
from recipes.rank.names import name_field
from recipes.rank.program import is_main_rank, main, rank
from recipes.rank.ranks import broadcast, join, num_ranks

Setting = dict[str, str | None]
# Minimum of bytes that each of n ranks sends, divided by the size (nccl-tests, PERFORMANCE.md).
BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
PROGRAMS = ("torch", "rccl-tests")
# Benchmark programs of the package rccl-tests, which have the same names in nccl-tests.
RCCL_TESTS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "broadcast": "broadcast_perf",
}
RCCL_DTYPES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16"}
# Open MPI refuses to run as root, which is the user of most containers, without both variables.
ROOT_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MESH = ("gfx942", "gfx950")  # boards that link every pair of GPUs directly
BASELINE = "as configured"  # name of the setting that adds no variables
# If this is set, ranks use torchrun's store, which belongs to the parent processes.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass
class CollectivesConfig(SeriesConfig):
    """Arguments. Sizes grow from `min_bytes` by `factor`, up to and including `max_bytes`.

    `ranks`: numbers above the run's number of ranks are skipped. `dtypes` null: the hardware's
    preferred dtype and fp32. `settings`: sets of environment variables, added to the run's; null
    unsets a variable. With fewer than the maximum of `ranks`, only the first dtype is measured,
    without `settings`. `timeout_s`: limit for one case, including the start of its processes.
    """

    ops: list[str] = name_field(lambda: BUS_FACTOR)
    min_bytes: int = 1 << 10
    max_bytes: int = 4 << 30
    factor: int = field(default=4, metadata={"minimum": 2})
    ranks: list[int] = field(default_factory=lambda: [2, 4, 8], metadata={"minimum": 2})
    dtypes: list[str] | None = name_field(lambda: DTYPES, None)
    programs: list[str] = name_field(lambda: PROGRAMS, ["torch"])
    settings: list[dict[str, Any]] = field(default_factory=list)
    warmup: int = 5
    repetitions: int = 20
    timeout_s: float = 300.0

    @property
    def sizes(self) -> list[int]:
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes if sizes[-1] == self.max_bytes else [*sizes, self.max_bytes]

    @property
    def series(self) -> list[tuple[int, int]]:
        """Return the first and last size of each run of rccl-tests.

        rccl-tests multiplies by the factor and may miss the last size, which then has its own run.
        """
        *others, last = self.sizes
        if not others or last == others[-1] * self.factor:
            return [(self.min_bytes, last)]
        return [(self.min_bytes, others[-1]), (last, last)]


COLUMNS = "op ranks bytes dtype setting program us algorithm_gb_s bus_gb_s share_of_limit"


def collectives(config: DictConfig) -> dict[str, Any]:
    args = CollectivesConfig(**config.trainer_args)
    ranks = sorted(n for n in args.ranks if n <= num_ranks())
    device_of(args)
    join()  # connects the parent processes; the processes that measure create their own groups
    table = Table("collectives", COLUMNS, figure="bus_gb_s")
    settings = distinct_settings(args.settings, table.notes)
    check_variables(set().union(*args.settings), "method.args.settings")
    table.notes.extend(notes(args, ranks))
    workers = Workers(args, ranks, settings)
    rows = cases(args, config, ranks, settings)
    work = functools.partial(measure_one, args=args, config=config, workers=workers)
    try:
        return measure(config, args, table, rows, work, skip=workers.skip)
    finally:
        workers.close()


def cases(
    args: CollectivesConfig, config: DictConfig, ranks: Sequence[int], settings: dict[str, Setting]
) -> list[Row]:
    """Return a case for each number of ranks, operation and size, then other dtypes and settings.

    Other dtypes and settings have cases only for the largest number of ranks. Sizes with less than
    one fp32 element per rank are left out.
    """
    preferred = next(name for name in config.hardware.precisions if name in DTYPES)
    dtypes = args.dtypes or list(dict.fromkeys([preferred, "fp32"]))
    series = [(BASELINE, n, dtypes[0]) for n in ranks]
    for largest in ranks[-1:]:
        series += [(BASELINE, largest, dtype) for dtype in dtypes[1:]]
        series += [(name, largest, dtypes[0]) for name in settings if name != BASELINE]
    return [
        {**case, "ranks": n, "dtype": dtype, "setting": setting}
        for setting, n, dtype in series
        for case in grid(program=args.programs, op=args.ops, bytes=args.sizes)
        if case["bytes"] >= 4 * n
        if case["program"] == "torch" or shutil.which(RCCL_TESTS[case["op"]])
    ]


def distinct_settings(settings: Sequence[Setting], notes: list[str]) -> dict[str, Setting]:
    """Return settings by name, first BASELINE. Add a note for each setting that changes nothing."""
    by_name: dict[str, Setting] = {BASELINE: {}}
    for setting in settings:
        setting = {key: None if value is None else str(value) for key, value in setting.items()}
        name = " ".join(
            f"{key} unset" if value is None else f"{key}={value}" for key, value in setting.items()
        )
        if all(os.environ.get(key) == value for key, value in setting.items()):
            notes.append(f"{name}: already part of this run's environment, so not measured again.")
        else:
            by_name[name] = setting
    return by_name


def notes(args: CollectivesConfig, ranks: Sequence[int]) -> list[str]:
    lines = []
    unavailable = [str(n) for n in args.ranks if n not in ranks]
    if unavailable:
        lines.append(f"{', '.join(unavailable)} ranks are left out, because this run has fewer.")
    if not ranks:
        lines.append(f"Use topology=ddp topology.num_gpus={min(args.ranks)}.")
    missing = [RCCL_TESTS[op] for op in args.ops if not shutil.which(RCCL_TESTS[op])]
    if "rccl-tests" in args.programs and missing:
        lines.append(f"Not on the PATH: {', '.join(missing)}. Install ROCm's package rccl-tests.")
    threaded = [name for op in args.ops if shutil.which(name := RCCL_TESTS[op])]
    threaded = [name for name in threaded if not starts_by_mpi(name)]
    if "rccl-tests" in args.programs and threaded:
        lines.append(
            f"{', '.join(threaded)}: one process with a thread per GPU, which is slower than a "
            "process per GPU (AMD's workload guide). Build rccl-tests with MPI=1 and install "
            "mpirun."
        )
    return lines


def limit_gb_s(config: DictConfig, ranks: int) -> float | None:
    """Return the GB/s that each of `ranks` devices can send over its links, or None if unknown."""
    hardware = config.hardware
    if hardware.link_gb_s is None or hardware.link == "none" or ranks > hardware.gpus_per_node:
        return None
    hive = hardware.hive or hardware.gpus_per_node
    if ranks > hive:  # links between hives limit the ring
        return float(hardware.hives_gb_s) if hardware.hives_gb_s else None
    if hardware.link == "xgmi" and ranks < hive:
        return hardware.link_gb_s * (ranks - 1) / (hive - 1) if hardware.gfx in MESH else None
    return float(hardware.link_gb_s)


def measure_one(case: Row, args: CollectivesConfig, config: DictConfig, workers: Workers) -> Row:
    """Measure a case and return its figures. Raise UserError if it fails or the result is wrong."""
    by_torch = case["program"] == "torch"
    ms, wrong = workers.measure(case) if by_torch else by_rccl_tests(case, args, workers)
    if wrong:
        raise UserError(f"{wrong} elements of the result are wrong")
    algorithm = case["bytes"] / ms / 1e6
    bus = algorithm * BUS_FACTOR[case["op"]](case["ranks"])
    limit = limit_gb_s(config, case["ranks"])
    return {
        "us": ms * 1e3,
        "algorithm_gb_s": algorithm,
        "bus_gb_s": bus,
        "share_of_limit": bus / limit if limit else None,
    }


class Workers:
    """This rank's process for the current setting. All ranks measure in the same order."""

    def __init__(
        self, args: CollectivesConfig, ranks: Sequence[int], settings: dict[str, Setting]
    ) -> None:
        self.args, self.ranks, self.settings = args, ranks, settings
        self.process: subprocess.Popen[bytes] | None = None
        self.setting: str | None = None
        self.answered = False  # if a process never answers, its setting is not tried again
        self.failures: dict[tuple, str] = {}  # series -> the reason to skip its other cases
        # Series -> results of rccl-tests by size, because one run measures all sizes.
        self.rccl_results: dict[tuple, dict[int, tuple[float, int]]] = {}

    def skip(self, case: Row, rows: list[Row]) -> str | None:
        return self.failures.get(series_of(case))

    def env(self, setting: str) -> dict[str, str]:
        env = {**os.environ, **self.settings[setting]}
        return {
            name: value for name, value in env.items() if value is not None and name != AGENT_STORE
        }

    def measure(self, case: Row) -> tuple[float, int]:
        """Return milliseconds per call and the number of wrong elements.

        If one rank fails, raise UserError or OutOfMemoryError on every rank.
        """
        if self.process is None or self.setting != case["setting"]:
            self.start(case["setting"])
        counts = {"warmup": self.args.warmup, "repetitions": self.args.repetitions}
        try:
            answer, *_ = gather_results(lambda: self.ask({**case, **counts}))
        except UserError as failure:
            self.close()
            if not self.answered:
                self.failures[series_of(case)] = str(failure)
            raise
        self.answered = True
        return answer["ms"], answer["wrong"]

    def start(self, setting: str) -> None:
        self.close()
        port = broadcast(free_port() if is_main_rank() else None)
        self.connection, theirs = multiprocessing.Pipe()
        options = {"ranks": self.ranks, "timeout_s": self.args.timeout_s}
        options |= {"use_cpu": self.args.use_cpu, "descriptor": theirs.fileno()}
        argv = [sys.executable, "-m", "recipes.bench.collective_rank", json.dumps(options)]
        env = {**self.env(setting), "MASTER_PORT": str(port)}
        # torchrun's signals reach the new process too, so it inherits a mask that blocks them. It
        # ends when this rank closes the connection.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            self.process = subprocess.Popen(argv, env=env, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self.setting, self.answered = setting, False

    def ask(self, case: Row) -> dict[str, Any]:
        assert self.process is not None
        answer = {"error": f"no answer within method.args.timeout_s={self.args.timeout_s:g} s"}
        try:
            self.connection.send(case)
            if self.connection.poll(self.args.timeout_s):
                answer = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            answer["error"] = f"the measuring process ended with exit code {code}; see logs/"
        if answer.get("error") == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError
        if "error" in answer:
            raise UserError(f"rank {rank()}: {answer['error']}")
        return answer

    def close(self) -> None:
        if self.process is None:
            return
        self.connection.close()  # the process then exits
        try:
            self.process.wait(self.args.timeout_s if self.answered else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def series_of(case: Row) -> tuple:
    """Return a key for cases that fail together.

    With torch these are all cases of a setting; with rccl-tests, all sizes of one run.
    """
    if case["program"] == "torch":
        return (case["setting"],)
    return (case["setting"], case["op"], case["dtype"], case["ranks"])


def by_rccl_tests(case: Row, args: CollectivesConfig, workers: Workers) -> tuple[float, int]:
    """Return milliseconds per call and the number of wrong elements.

    The first case of a series runs the program for all sizes, on the main rank while the others
    wait. Raise UserError on every rank if it fails, or prints no row for this size.
    """
    key = series_of(case)

    def by_size() -> dict[int, tuple[float, int]]:
        rows = {}
        for first, last in args.series if is_main_rank() else ():
            program = RCCL_TESTS[case["op"]]
            by_mpi = starts_by_mpi(program)
            start = f"mpirun -np {case['ranks']} {program}" if by_mpi else program
            argv = (
                f"{start} -b {first} -e {last} -f {args.factor} "
                f"-t {1 if by_mpi else case['ranks']} -g 1 -d {RCCL_DTYPES[case['dtype']]} "
                f"-w {args.warmup} -n {args.repetitions}"
            ).split()
            env = {**ROOT_MPI, **workers.env(case["setting"])}
            rows |= parse_output(argv, parse_rccl_tests, env, args.timeout_s)
        return rows

    if key not in workers.rccl_results:
        workers.close()  # frees the memory of the process's buffers and communicators
        try:
            workers.rccl_results[key] = gather_results(by_size)[0]
        except UserError as failure:
            workers.failures[key] = str(failure)
            raise
    if case["bytes"] not in workers.rccl_results[key]:
        raise UserError("the program printed no row for this size")
    return workers.rccl_results[key][case["bytes"]]


def starts_by_mpi(program: str) -> bool:
    """Return whether mpirun can start a process of the program for each GPU.

    Without MPI, each process of the program would be a separate test of one GPU.
    """
    path = shutil.which(program)
    return bool(path and shutil.which("mpirun") and b"MPI_Init" in Path(path).read_bytes())


def parse_rccl_tests(text: str) -> dict[int, tuple[float, int]]:
    """Return size in bytes -> (milliseconds per call, number of wrong elements), out of place.

    The columns are size, count, type, reduction and root. Four more follow: time in microseconds,
    algorithm bandwidth, bus bandwidth and number of wrong elements (N/A: not checked). These four
    are out of place, and are repeated for in place.
    """
    rows = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 13 and words[0].isdigit():
            us, wrong = words[5], words[8]
            rows[int(words[0])] = (float(us) / 1e3, int(float(wrong)) if wrong != "N/A" else 0)
    return rows


if __name__ == "__main__":
    main(collectives)
