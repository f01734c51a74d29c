"""Run recipes/measure/health.py, one process per GPU, in a training run's environment.

A timeout keeps it from hanging the doctor.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from launch.checks import state
from launch.checks.facts import Facts
from launch.checks.finding import Status
from launch.checks.measured import Measured, Outcome, file_of, read
from launch.config.compose import compose
from launch.core.errors import HostError
from launch.execution import logs, orphans
from launch.execution.local import LocalProcess
from launch.machine import masks, placement
from launch.plan import environment
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.plan import Process, Setting

PROGRAM = "recipes.measure.health"
# Eight processes that import torch from a slow disk and start RCCL take a minute. The tests take 10
# to 20 s.
TIMEOUT_S = 180.0
POLL_S = 0.1
ON_CPU = 2  # processes: enough for an all-reduce
SHOWN_LINES = 3  # of the output of a failed process
AGAIN = "python launch/doctor.py active=force"
OWN_SETTINGS = {
    "GLOO_SOCKET_IFNAME": (
        "lo",
        "the processes are all here, and a container may not know its own name",
    ),
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": ("5", "there is nothing to save"),
}


def run(facts: Facts, force: bool) -> Outcome:
    """Start the processes and wait for their results. Their failures never raise."""
    if not_run := _obstacle(facts, force):
        return Outcome(not_run=not_run)
    try:
        config, gpus = _composed(facts)
        with (
            tempfile.TemporaryDirectory(prefix="doctor-") as folder,
            orphans.guarded(stop_timeout_s=1.0),
        ):
            return _watched(config, facts, gpus, force, Path(folder))
    except HostError as error:
        return Outcome(not_run=(str(error), "choose GPUs by index, or unset the mask"))


def _obstacle(facts: Facts, force: bool) -> tuple[str, str] | None:
    """Return why the tests cannot run, and the fix."""
    if importlib.util.find_spec("torch") is None:
        cure = "make setup, then .venv/bin/python launch/doctor.py active=true"
        return f"{sys.executable} has no torch", cure
    if facts.hardware is None:
        why = "no group of conf/hardware fits, so nothing says what to expect"
        return why, "name one: hardware=GROUP"
    if facts.hardware.vendor == Vendor.none:
        return None
    if not facts.gpus:
        cure = "hardware=cpu tests processes and their all-reduce without one"
        return "no GPU was found", cure
    if force:
        return None
    findings = filter(None, (state.memory_occupied(facts), state.foreign_processes(facts)))
    others = [f.read for f in findings if f.status in (Status.warn, Status.fail)]
    cure = f"wait for them, or test beside them: {AGAIN}"
    return (f"the GPUs are in use: {'; '.join(others)}", cure) if others else None


def _composed(facts: Facts) -> tuple[Config, tuple[int, ...]]:
    """Return a composition with one rank per GPU, and the GPUs' indices.

    They are the GPUs of the caller's mask, or all. Raises HostError.
    """
    assert facts.hardware is not None
    overrides = [f"hardware={facts.hardware.name}", "runtime=local", "topology=ddp"]
    if facts.hardware.vendor == Vendor.none:
        return compose([*overrides, f"topology.num_gpus={ON_CPU}"]), ()
    names = masks.AMD if facts.is_amd else masks.NVIDIA
    mask = next(iter(masks.in_force(names, facts.host.environ).values()), None)
    is_amd = facts.hardware.vendor == Vendor.amd
    of_vendor = [gpu for gpu in facts.gpus if gpu.gfx.startswith("gfx") == is_amd]
    count = len(of_vendor) if mask is None else len(mask.split(","))
    config = compose([*overrides, f"topology.num_gpus={count}"])
    return config, tuple(placement.visible_gpus(config, facts.host, count))


def dtype(config: Config) -> str:
    """Return the half precision that this hardware prefers; fp32 if it has no rate for any."""
    halves = [p for p in config.hardware.precisions if p in ("bf16", "fp16")]
    return next((p for p in halves if p in config.hardware.peak_tflops), "fp32")


def _process(
    config: Config, facts: Facts, gpus: tuple[int, ...], force: bool, folder: Path
) -> Process:
    count = len(gpus) or ON_CPU
    argv = [facts.host.python, "-m", "torch.distributed.run", "--standalone"]
    argv += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(count), "-m", PROGRAM]
    argv += ["--folder", str(folder), "--device", "cuda" if gpus else "cpu"]
    argv += ["--dtype", dtype(config), *(["--force"] if force else [])]
    own = environment.settings(config, facts.host, "trainer", list(gpus), folder, count)
    settings = {setting.name: setting for setting in own}
    for name, (value, reason) in OWN_SETTINGS.items():
        settings[name] = Setting(name, value, reason, "launcher")
    return Process("health", "health", argv, list(settings.values()), list(gpus), count)


def _watched(
    config: Config, facts: Facts, gpus: tuple[int, ...], force: bool, folder: Path
) -> Outcome:
    process, log = _process(config, facts, gpus, force, folder), folder / "log"
    began = time.monotonic()
    child = LocalProcess(process, log)
    console = Console(stderr=True)
    what = "GPU(s)" if gpus else "processes on the CPU"
    label = f"active tests: {process.num_ranks} {what}, at most {TIMEOUT_S:g} s"
    try:
        with console.status(label) as status:
            if not console.is_terminal:
                console.print(label, highlight=False, markup=False, soft_wrap=True)
            while (code := child.poll()) is None and time.monotonic() - began < TIMEOUT_S:
                time.sleep(POLL_S)
                first = _read(folder, 1)[0].get(0)
                phase = first.phase if first else "starting"
                status.update(f"{label}: {phase}, {time.monotonic() - began:.0f} s")
    finally:
        child.remove()  # also if the doctor is interrupted
    measured, unread = _read(folder, process.num_ranks)
    fault = _fault(code, measured, unread, log)
    again = f"run it by hand for all that it says: {_by_hand(process, folder)}"
    return Outcome(
        gpus,
        tuple(measured.values()),
        time.monotonic() - began,
        failed=(fault, again) if fault else None,
    )


def _read(folder: Path, num_ranks: int) -> tuple[dict[int, Measured], dict[int, str]]:
    """Return what each rank wrote, and why a rank's file cannot be read."""
    measured, unread = {}, {}
    for rank in range(num_ranks):
        try:
            measured[rank] = read(file_of(folder, rank))
        except FileNotFoundError:
            unread[rank] = "wrote nothing"
        except (OSError, ValueError) as error:
            unread[rank] = str(error)
    return measured, unread


def _fault(
    code: int | None, measured: dict[int, Measured], unread: dict[int, str], log: Path
) -> str | None:
    """Return what went wrong in one line; None if every process completed all tests.

    `code` is None after a timeout.
    """
    if code == 0:
        return "; ".join(f"process {rank}: {why}" for rank, why in unread.items()) or None
    at = {rank: f"was in {result.phase}" for rank, result in measured.items()} | unread
    where = ", ".join(f"process {rank} {at[rank]}" for rank in sorted(at))
    words = logs.last_words(log)
    if words.lines:
        shown = (line.strip()[:200] for line in words.lines[-SHOWN_LINES:])
        where += f". Last lines: {' | '.join(shown)}"
    if code is None:
        return f"no end within {TIMEOUT_S:g} s, so it was killed: {where}"
    if words.rank is None or words.exit_code is None:
        return where
    number = words.exit_code
    why = logs.killed_by(-number) if number < 0 else f"exit code {number}"
    return f"process {words.rank} ended first, {why}; {where}"


def _by_hand(process: Process, folder: Path) -> str:
    """Return the command to run a process by hand, with a folder that outlives it."""
    argv = ["measured" if word == str(folder) else word for word in process.argv]
    names = (*placement.MASK.values(), "GLOO_SOCKET_IFNAME")
    mask = [f"{s.name}={s.value}" for s in process.settings if s.name in names]
    return shlex.join([*mask, f"PYTHONPATH={environment.ROOT}", *argv])
