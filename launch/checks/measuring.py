"""Run recipes/measure/health.py, one process per GPU, in a training run's environment.

Tests that hang are stopped after TIMEOUT_S.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from launch.checks import state
from launch.checks.facts import Facts
from launch.checks.finding import Status
from launch.checks.measured import Measured, Outcome
from launch.config.compose import compose
from launch.core.errors import HostError
from launch.execution import logs, orphans
from launch.execution.local import LocalProcess
from launch.machine import masks, placement
from launch.plan import inherited, process_env
from launch.schema.enums import Vendor
from launch.schema.plan import Process, Setting

PROGRAM = "recipes.measure.health"
# Eight processes that import torch from a slow disk and start RCCL take a minute. The tests take 10
# to 20 s.
TIMEOUT_S = 180.0
POLL_S = 0.1
NUM_CPU_PROCESSES = 2  # enough for an all-reduce
MAX_LINES = 3  # a report shows of a failed process's output
FORCE = "python launch/doctor.py active=force"
LOOPBACK = "all processes are on this machine, and a container may not resolve its name"
OWN_SETTINGS = (
    Setting("GLOO_SOCKET_IFNAME", "lo", LOOPBACK, "launcher"),
    Setting(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5", "no process has a checkpoint to save", "launcher"
    ),
)


def run(facts: Facts, force: bool) -> Outcome:
    """Run the tests and return their outcome. A failed process does not raise."""
    if obstacle := _obstacle(facts, force):
        return Outcome(not_run=obstacle)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="doctor-") as folder,
            orphans.guarded(stop_timeout_s=1.0),
        ):
            return _run_and_collect(process_of(facts, force, Path(folder)), Path(folder))
    except HostError as error:
        return Outcome(not_run=(str(error), "choose GPUs by index, or unset the mask"))


def _obstacle(facts: Facts, force: bool) -> tuple[str, str] | None:
    """Return why the tests cannot run, and the remedy; None if they can."""
    if importlib.util.find_spec("torch") is None:
        remedy = "make setup, then .venv/bin/python launch/doctor.py active=true"
        return f"{sys.executable} has no torch", remedy
    if facts.hardware is None:
        why = "no group of conf/hardware matches, so the healthy rates are unknown"
        return why, "choose a group: hardware=GROUP"
    if facts.hardware.vendor == Vendor.none:
        return None
    if not facts.gpus:
        remedy = "without a GPU, hardware=cpu tests processes and their all-reduce"
        return "no GPU was found", remedy
    findings = filter(None, (state.memory_occupied(facts), state.foreign_processes(facts)))
    others = [f.read for f in findings if f.status in (Status.warn, Status.fail)]
    remedy = f"wait until they are free, or test anyway: {FORCE}"
    return (f"the GPUs are in use: {'; '.join(others)}", remedy) if others and not force else None


def process_of(facts: Facts, force: bool, folder: Path) -> Process:
    """Return the process with a rank per GPU in the caller's mask and the environment of a run.

    It computes in the 16-bit precision that the hardware prefers, or in fp32 if conf/hardware has
    no peak for either. Raises HostError.
    """
    assert facts.hardware is not None
    hardware, gpus = facts.hardware, list[int]()
    overrides = [f"hardware={hardware.name}", "runtime=local", "topology=ddp"]
    if hardware.vendor == Vendor.none:
        count = NUM_CPU_PROCESSES
        config = compose([*overrides, f"topology.num_gpus={count}"])
    else:
        names = masks.AMD if facts.is_amd else masks.NVIDIA
        mask = next(iter(masks.active(names, facts.host.environ).values()), None)
        is_amd = hardware.vendor == Vendor.amd
        of_vendor = [gpu for gpu in facts.gpus if gpu.is_amd == is_amd]
        count = len(of_vendor) if mask is None else len(mask.split(","))
        config = compose([*overrides, f"topology.num_gpus={count}"])
        gpus = placement.visible_gpus(config, facts.host, count)
    half_precisions = [p for p in hardware.precisions if p in ("bf16", "fp16")]
    dtype = next((p for p in half_precisions if p in hardware.peak_tflops), "fp32")
    argv = [facts.host.python, "-m", "torch.distributed.run", "--standalone"]
    argv += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(count), "-m", PROGRAM]
    argv += ["--folder", str(folder), "--device", "cuda" if gpus else "cpu"]
    argv += ["--dtype", dtype, *(["--force"] if force else [])]
    run = process_env.settings(config, facts.host, "trainer", gpus, folder, count)
    settings = {setting.name: setting for setting in (*run, *OWN_SETTINGS)}
    passed = inherited.names(config, facts.host.environ, settings)
    values = list(settings.values())
    return Process("health", "health", argv, values, gpus, count, inherited=passed)


def _run_and_collect(process: Process, folder: Path) -> Outcome:
    """Run the process for at most TIMEOUT_S, and return the results that its ranks wrote."""
    log, start, console = folder / "log", time.monotonic(), Console(stderr=True)
    devices = "GPU(s)" if process.gpus else "processes on the CPU"
    label = f"active tests: {process.num_ranks} {devices}, at most {TIMEOUT_S:g} s"
    child = LocalProcess(process, log)
    try:
        with console.status(label):
            if not console.is_terminal:
                console.print(label, highlight=False, markup=False, soft_wrap=True)
            while (code := child.poll()) is None and time.monotonic() - start < TIMEOUT_S:
                time.sleep(POLL_S)
    finally:
        child.remove()  # even if the doctor is interrupted
    measured, unreadable = {}, {}
    for rank in range(process.num_ranks):
        file = folder / f"rank{rank}.json"
        try:
            measured[rank] = Measured(**json.loads(file.read_text()))
        except FileNotFoundError:
            unreadable[rank] = "wrote nothing"
        except (OSError, ValueError, TypeError) as error:
            unreadable[rank] = f"{file.name} is malformed: {error}"
    failed = None
    if problem := _problem(code, measured, unreadable, log):
        argv = ["measured" if word == str(folder) else word for word in process.argv]
        names = (*placement.MASK.values(), "GLOO_SOCKET_IFNAME")
        mask = [f"{s.name}={s.value}" for s in process.settings if s.name in names]
        command = shlex.join([*mask, f"PYTHONPATH={process_env.ROOT}", *argv])
        failed = (problem, f"to see all of its output, run it yourself: {command}")
    seconds = time.monotonic() - start
    return Outcome(tuple(process.gpus), tuple(measured.values()), seconds, failed)


def _problem(
    code: int | None, measured: dict[int, Measured], unreadable: dict[int, str], log: Path
) -> str | None:
    """Describe the failure in one line; None if every process completed all tests.

    `code` is None after a timeout.
    """
    if code == 0:
        return "; ".join(f"process {rank}: {why}" for rank, why in unreadable.items()) or None
    progress = {rank: f"was in {result.phase}" for rank, result in measured.items()} | unreadable
    problem = ", ".join(f"process {rank} {progress[rank]}" for rank in sorted(progress))
    words = logs.tail(log)
    if words.lines:
        shown = (line.strip()[:200] for line in words.lines[-MAX_LINES:])
        problem += f". Last lines: {' | '.join(shown)}"
    if code is None:
        return f"killed after {TIMEOUT_S:g} s: {problem}"
    if words.rank is None or words.exit_code is None:
        return problem
    number = words.exit_code
    why = logs.killed_by(-number) if number < 0 else f"exit code {number}"
    return f"process {words.rank} exited first, {why}; {problem}"
