"""Start a plan's processes here, watch them, stop them together, and leave the record."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from launch import record, rundir
from launch.detect import Host
from launch.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER, HostError
from launch.plan import Plan, as_json, rank_config
from launch.progress import Progress
from launch.schema import Vendor
from launch.topology import Process

POLL_S = 0.2
# How long ranks may take to save after SIGTERM before they are killed.
GRACE_S = 120.0
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py.*failed \(exitcode")
STATUS = {EXIT_DONE: "done", EXIT_INTERRUPTED: "interrupted"}


def check_host(plan: Plan, host: Host) -> None:
    """Raises HostError where this machine, or this version, cannot run the plan. mode=plan does not ask."""
    config = plan.config
    vendor = config.hardware.vendor
    offer = "mode=plan shows what would run; smoke=true runs it small, on the CPU"
    if vendor != Vendor.none:
        here = [gpu for gpu in host.gpus if (gpu.gfx.startswith("gfx")) == (vendor == Vendor.amd)]
        needed = sum(len(p.gpus) for p in plan.processes)
        if len(here) < needed:
            raise HostError(f"hardware={config.hardware.name}: {needed} {vendor.name} GPU(s) needed, {len(here)} found here. {offer}.")
    if len(plan.processes) > 1 or plan.processes[0].num_ranks > 1:
        raise HostError(f"topology={config.topology.name}: this version plans several GPUs and runs one. topology=single runs; {offer}.")
    if config.precision.compute == "fp8" or config.precision.weights == "nf4":
        raise HostError(f"precision={config.precision.name}: this version plans it and does not train in it yet. {offer}.")
    tight = [m for m in plan.memory if not m.fits and vendor != Vendor.none]
    if tight:
        m = tight[0]
        raise HostError(
            f"{m.process} on GPU {m.gpu}: {m.total_gb:.1f} GB estimated, {m.capacity_gb:g} GB there; "
            f"{m.total_gb - m.capacity_gb:.1f} GB missing. A smaller per_device_train_batch_size or max_length, "
            "gradient_checkpointing=true, adapter=lora, or more GPUs under topology=fsdp."
        )


def execute(plan: Plan, host: Host, overrides: list[str], parent: str | None = None) -> int:
    """Run the plan to its end. Returns the exit code; the run directory holds everything else."""
    rundir.make(plan.run_dir)
    with rundir.locked(plan.run_dir):
        _write_inputs(plan)
        began = record.begin(plan, host, overrides, parent)
        rundir.write_json(plan.run_dir / "record.json", began)
        exit_code = _supervise(plan)
        result = rundir.read_json(plan.run_dir / "result.json")
        metrics = rundir.read_metrics(plan.run_dir / "metrics.jsonl")
        status = STATUS.get(exit_code, "failed")
        rundir.write_json(plan.run_dir / "record.json", record.finish(began, plan.run_dir, status, exit_code, metrics, result))
    return exit_code


def _write_inputs(plan: Plan) -> None:
    rundir.write_text(plan.run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(rank_config(plan))))
    rundir.write_json(plan.run_dir / "plan.json", as_json(plan))
    (plan.run_dir / "result.json").unlink(missing_ok=True)  # of an earlier attempt: it would pass for this one's


def _supervise(plan: Plan) -> int:
    """Start all, wait for all; the first failure or a signal stops the rest."""
    stopping: list[int] = []
    running: list[tuple[Process, subprocess.Popen[bytes]]] = []
    with _signals(stopping), contextlib.ExitStack() as files, Progress(plan) as progress:
        try:
            for process in plan.processes:
                log = files.enter_context((plan.run_dir / "logs" / f"{process.name}.log").open("ab"))
                running.append((process, _start(process, log)))
            failed = _wait(running, progress, stopping)
        finally:
            _stop([child for _, child in running])
        progress.update()
    return _exit_code(plan, failed, bool(stopping))


@contextlib.contextmanager
def _signals(received: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM are noted here and handled in the loop; the old handlers come back after."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda got, _frame: received.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _start(process: Process, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C reaches the launcher only, which then lets every rank save."""
    environment = {**os.environ, **process.env}
    return subprocess.Popen(
        process.argv, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _wait(running: list[tuple[Process, subprocess.Popen[bytes]]], progress: Progress, stopping: list[int]) -> Process | None:
    """The process that failed first, or None when all ended well or a signal came."""
    while any(child.poll() is None for _, child in running):
        for process, child in running:
            if child.poll() not in (None, 0):
                return process
        if stopping:
            return None
        progress.update()
        time.sleep(POLL_S)
    return next((process for process, child in running if child.returncode != 0), None)


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to every rank, time to save, then SIGKILL to what is left of each session."""
    for child in children:
        _signal_session(child, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        _signal_session(child, signal.SIGKILL)
        child.wait()


def _signal_session(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it is gone: that is what we wanted
        os.killpg(child.pid, number)


def last_lines(log: Path, count: int = 15) -> list[str]:
    """What a process said last, before torchrun began to report on it."""
    with log.open(errors="replace") as file:
        said = itertools.takewhile(lambda line: not TORCHRUN_REPORT.search(line), file)
        return [line.rstrip("\n") for line in deque(said, maxlen=count)]


def _exit_code(plan: Plan, failed: Process | None, interrupted: bool) -> int:
    result: dict[str, Any] = rundir.read_json(plan.run_dir / "result.json") or {}
    if interrupted or result.get("status") == "interrupted":
        return EXIT_DONE if result.get("status") == "done" else EXIT_INTERRUPTED
    if failed is None and result.get("status") == "done":
        return EXIT_DONE
    process = failed or plan.processes[-1]
    log = plan.run_dir / "logs" / f"{process.name}.log"
    print(f"\n{process.name} failed" + (f": {result['error']}" if result.get("error") else "") + f"\nLast lines of {log}:")
    print("".join(f"  | {line}\n" for line in last_lines(log)), end="")
    return EXIT_USER if result.get("exit_code") == EXIT_USER else EXIT_FAILED
