"""Collective operations between GPUs: latency, algorithm and bus bandwidth over sizes, ranks and settings of RCCL (NCCL).

Started by the launcher, on two or more GPUs of a node:

    8 GPUs:      python launch/run.py hardware=mi350x method=bench/collectives
    A setting:   python launch/run.py hardware=mi350x method=bench/collectives 'method.args.settings=[{NCCL_MIN_NCHANNELS: "112"}]'

Method and factors of nccl-tests (doc/PERFORMANCE.md): 5 calls before, 20 timed as one stretch; algorithm bandwidth is size over time, bus
bandwidth is that times the share of the array that one rank has to send whatever the algorithm, so that it compares with the links. Each
set of environment variables is measured in processes of its own (recipes/bench/collective_rank.py). Small sizes include what
torch.distributed costs on the host; the rows of rccl-tests do not.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from recipes.bench import rccl_tests
from recipes.bench.collective_rank import DTYPES
from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure
from recipes.common.errors import UserError
from recipes.common.names import named
from recipes.common.program import is_main_rank, main

Setting = dict[str, str | None]
# Bytes that a rank sends at least, as a share of the size, by the number of ranks (nccl-tests, doc/PERFORMANCE.md).
BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
PROGRAMS = ("torch", "rccl-tests")
MESH = ("gfx942", "gfx950")  # boards on which every GPU has a link of its own to each other one
BASELINE = "as configured"
TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"  # its store belongs to the parents


@dataclass
class CollectivesConfig(SeriesConfig):
    """Sizes from `min_bytes`, each `factor` times the one before, and `max_bytes` at last. `ranks`: those that the run has are measured.
    `dtypes` empty: the hardware's preferred one and fp32. `settings`: sets of environment variables beyond the run's own; null unsets
    one. Further dtypes and settings are measured on the most ranks. `timeout_s`: of one case, the start of its processes included.

    Raises UserError.
    """

    ops: list[str] = named(lambda: BUS_FACTOR)
    min_bytes: int = 1 << 10
    max_bytes: int = 4 << 30
    factor: int = 4
    ranks: list[int] = field(default_factory=lambda: [2, 4, 8])
    dtypes: list[str] | None = named(lambda: DTYPES, None)
    programs: list[str] = named(lambda: PROGRAMS, ["torch"])
    settings: list[dict[str, Any]] = field(default_factory=list)
    warmup: int = 5
    repetitions: int = 20
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("ops", "ranks", "programs")
        if min(self.ranks) < 2:
            raise UserError(f"method.args.ranks={self.ranks}: a collective takes at least 2 ranks.")
        if not 0 < self.min_bytes <= self.max_bytes or self.factor < 2:
            raise UserError(
                f"method.args.min_bytes={self.min_bytes}, max_bytes={self.max_bytes}, factor={self.factor}: the first size is above 0 and "
                "not above the last, and the factor at least 2."
            )
        if self.min_bytes < 4 * max(self.ranks):
            raise UserError(f"method.args.min_bytes={self.min_bytes}: {max(self.ranks)} ranks share it in fp32: at least 4 bytes each.")
        if self.timeout_s <= 0:
            raise UserError(f"method.args.timeout_s={self.timeout_s}: above 0.")
        if not all(self.settings):
            raise UserError("method.args.settings: {} sets nothing; the run's own environment is measured in any case.")

    @property
    def sizes(self) -> list[int]:
        found = [self.min_bytes]
        while found[-1] * self.factor <= self.max_bytes:
            found.append(found[-1] * self.factor)
        return found if found[-1] == self.max_bytes else [*found, self.max_bytes]

    @property
    def series(self) -> list[tuple[int, int]]:
        """First and last size of each run of rccl-tests, which knows no last one that the factor does not reach."""
        *before, last = self.sizes
        reached = not before or last == before[-1] * self.factor
        return [(self.min_bytes, last)] if reached else [(self.min_bytes, before[-1]), (last, last)]


def collectives(config: DictConfig) -> dict[str, Any]:
    args = CollectivesConfig(**config.trainer_args)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        raise UserError("bench/collectives with one rank: nothing would be communicated. Use: topology=ddp topology.num_gpus=2 or more.")
    device_of(args)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * args.timeout_s))  # the parents' own
    table = Table(
        "collectives",
        figure="bus_gb_s",
        columns=[
            Column("op", "op"),
            Column("ranks", "ranks"),
            Column("bytes", "bytes", 0),
            Column("dtype", "dtype"),
            Column("setting", "setting"),
            Column("program", "program"),
            Column("us", "us", 1),
            Column("algorithm_gb_s", "alg GB/s", 2),
            Column("bus_gb_s", "bus GB/s", 2),
            Column("share_of_limit", "of links", 2),
        ],
    )
    ranks = [n for n in args.ranks if n <= world]
    if not ranks:
        raise UserError(f"method.args.ranks={args.ranks}: this run has {world}.")
    settings = chosen(args.settings, table.notes)
    table.notes.extend(notes(args, config, ranks))
    workers = Workers(args, ranks, settings)
    try:
        return measure(config, args, table, cases(args, config, ranks, settings), lambda case: one(case, args, config, workers))
    finally:
        workers.close()


def cases(args: CollectivesConfig, config: DictConfig, ranks: Sequence[int], settings: dict[str, Setting]) -> list[Row]:
    """Every size of every operation: for each number of ranks, then for further dtypes and settings on the most of them."""
    preferred = next(name for name in config.hardware.precisions if name in DTYPES)
    dtypes = args.dtypes or list(dict.fromkeys([preferred, "fp32"]))
    series = [(BASELINE, n, dtypes[0]) for n in ranks]
    series += [(BASELINE, max(ranks), dtype) for dtype in dtypes[1:]]
    series += [(name, max(ranks), dtypes[0]) for name in settings if name != BASELINE]
    return [
        {"op": op, "ranks": n, "bytes": size, "dtype": dtype, "setting": setting, "program": program}
        for (setting, n, dtype), program, op, size in itertools.product(series, args.programs, args.ops, args.sizes)
        if program == "torch" or rccl_tests.installed(op)
    ]


def chosen(settings: Sequence[Setting], notes: list[str]) -> dict[str, Setting]:
    """By name, the run's own environment first. One that changes nothing here is left out, with a note."""
    found: dict[str, Setting] = {BASELINE: {}}
    for setting in settings:
        setting = {key: None if value is None else str(value) for key, value in setting.items()}
        name = " ".join(key + ("=" + value if value is not None else " unset") for key, value in setting.items())
        if all(os.environ.get(key) == value for key, value in setting.items()):
            notes.append(f"{name}: so it is in this run already; not measured twice.")
        else:
            found[name] = setting
    return found


def notes(args: CollectivesConfig, config: DictConfig, ranks: Sequence[int]) -> list[str]:
    found = []
    if limit_gb_s(config, ranks[-1]) is not None:
        found.append(
            f"Limit: {config.hardware.link_gb_s:g} GB/s, all links of one device in one direction (conf/hardware). Bus bandwidth is what "
            "a device has to send, so it holds for every operation. A switch that adds (NVLink SHARP) lets an all-reduce pass it; on a "
            "board where each GPU has a link of its own to each other one, fewer ranks have fewer links, and the limit is theirs."
        )
    left_out = [str(n) for n in args.ranks if n not in ranks]
    if left_out:
        found.append(f"Left out: {', '.join(left_out)} ranks; this run has fewer.")
    missing = [rccl_tests.PROGRAMS[op] for op in args.ops if not rccl_tests.installed(op)]
    if "rccl-tests" in args.programs and missing:
        found.append(f"rccl-tests: {', '.join(missing)} not on the PATH (package rccl-tests of ROCm, or built from ROCm/rccl-tests).")
    return found


def limit_gb_s(config: DictConfig, ranks: int) -> float | None:
    """Bytes a second that one of so many devices can send over its links; None where that is not known."""
    hardware = config.hardware
    if hardware.link_gb_s is None or hardware.link == "none" or ranks > hardware.gpus_per_node:
        return None
    hive = hardware.hive or hardware.gpus_per_node
    if ranks > hive:  # a ring crosses from hive to hive
        return float(hardware.hives_gb_s) if hardware.hives_gb_s else None
    if hardware.link == "xgmi" and ranks < hive:
        return hardware.link_gb_s * (ranks - 1) / (hive - 1) if hardware.gfx in MESH else None
    return float(hardware.link_gb_s)


def one(case: Row, args: CollectivesConfig, config: DictConfig, workers: Workers) -> Row:
    """Raises UserError where it could not be measured, or the result was wrong."""
    ms, wrong = workers.measure(case) if case["program"] == "torch" else by_rccl_tests(case, args, workers)
    if wrong:
        raise UserError(f"{wrong} elements of the result are wrong")
    algorithm = case["bytes"] / ms / 1e6
    bus = algorithm * BUS_FACTOR[case["op"]](case["ranks"])
    limit = limit_gb_s(config, case["ranks"])
    return {"us": ms * 1e3, "algorithm_gb_s": algorithm, "bus_gb_s": bus, "share_of_limit": bus / limit if limit else None}


class Workers:
    """This rank's process for the setting that is being measured. All ranks ask theirs the same, in the same order."""

    def __init__(self, args: CollectivesConfig, ranks: Sequence[int], settings: dict[str, Setting]) -> None:
        self.args, self.ranks, self.settings = args, ranks, settings
        self.process: subprocess.Popen[str] | None = None
        self.setting: str | None = None
        self.answered = False  # a process that has never answered would not do so the next time
        self.given_up: dict[str, str] = {}  # setting -> why
        self.by_program: dict[tuple, dict[int, tuple[float, int]]] = {}  # what rccl-tests measured, all sizes in one run

    def env(self, setting: str) -> dict[str, str]:
        env = {**os.environ, **self.settings[setting]}
        return {name: value for name, value in env.items() if value is not None and name != TORCHRUN}

    def measure(self, case: Row) -> tuple[float, int]:
        """Milliseconds and wrong elements. Raises UserError on every rank where one of them has no figure."""
        setting = case["setting"]
        if setting in self.given_up:
            raise UserError(f"not measured: {self.given_up[setting]}")
        if self.process is None or self.setting != setting:
            self.start(setting)
        answer = self.ask({**case, "warmup": self.args.warmup, "repetitions": self.args.repetitions})
        answers: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(answers, answer)
        error = next((f"rank {rank}: {found['error']}" for rank, found in enumerate(answers) if "error" in found), None)
        if error is None:
            self.answered = True
            return answer["ms"], answer["wrong"]
        if all(found.get("error") == "out of memory" for found in answers):
            raise UserError("out of memory")
        self.close()
        if not self.answered:
            self.given_up[setting] = error
        raise UserError(error)

    def start(self, setting: str) -> None:
        self.close()
        port: list[Any] = [_free_port() if is_main_rank() else None]
        dist.broadcast_object_list(port, src=0)
        read, write = os.pipe()
        argv = [sys.executable, "-m", "recipes.bench.collective_rank", "--reply", str(write), "--timeout-s", str(self.args.timeout_s)]
        argv += ["--ranks", *map(str, self.ranks), *(["--cpu"] if self.args.use_cpu else [])]
        env = {**self.env(setting), "MASTER_PORT": str(port[0])}
        # torchrun's signal to a rank reaches its process too, which inherits that they wait: this rank closes its stdin when told to stop.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, pass_fds=[write], text=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        os.close(write)
        self.reply, self.setting, self.answered = os.fdopen(read), setting, False

    def ask(self, case: Row) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: what it said last, if anything, is read below
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
        if not select.select([self.reply], [], [], self.args.timeout_s)[0]:
            return {"error": f"no answer in {self.args.timeout_s:g} s (method.args.timeout_s)"}
        line = self.reply.readline()
        return json.loads(line) if line else {"error": f"its process ended with exit code {self.process.wait()}: logs/ has its output"}

    def close(self) -> None:
        if self.process is None:
            return
        if not self.answered:
            self.process.kill()
        assert self.process.stdin is not None
        with self.process, self.reply:
            try:
                self.process.communicate(timeout=self.args.timeout_s)  # closes its stdin, at which it ends
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process = None


def by_rccl_tests(case: Row, args: CollectivesConfig, workers: Workers) -> tuple[float, int]:
    """The main rank runs the program, for all sizes at once; the others wait. Raises UserError on every rank."""
    key = tuple(case[name] for name in ("op", "ranks", "dtype", "setting"))
    if key not in workers.by_program:
        workers.close()  # its buffers and communicators leave the GPUs
        found: list[Any] = [None]
        if is_main_rank():
            runs = [
                rccl_tests.argv(case["op"], case["dtype"], case["ranks"], (*ends, args.factor), args.warmup, args.repetitions)
                for ends in args.series
            ]
            try:
                rows_of = [rccl_tests.measure(argv, workers.env(case["setting"]), args.timeout_s) for argv in runs]
                found = [{size: row for rows in rows_of for size, row in rows.items()}]
            except UserError as refused:
                found = [str(refused)]
        dist.broadcast_object_list(found, src=0)
        workers.by_program[key] = found[0]
    rows = workers.by_program[key]
    if isinstance(rows, str):
        raise UserError(rows)
    if case["bytes"] not in rows:
        raise UserError(f"{rccl_tests.PROGRAMS[case['op']]} printed no row for it")
    return rows[case["bytes"]]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main(collectives)
