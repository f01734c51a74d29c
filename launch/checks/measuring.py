"""Runs recipes/health/measure.py, one process a GPU, as a training run would be: same environment, same mask. It cannot hang the doctor."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from launch import environment
from launch.checks import state
from launch.checks.facts import Facts
from launch.checks.finding import Status
from launch.checks.measured import Measured, Outcome, file_of, read
from launch.compose import compose
from launch.environment import Setting
from launch.errors import HostError
from launch.machine import masks
from launch.runtimes.local import LocalProcess
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.supervision import logs, orphans
from launch.topology import Process

PROGRAM = "recipes.health.measure"
# Eight processes that import torch from a slow disk and start RCCL take a minute; the tests themselves 10 to 20 s.
TIMEOUT_S = 180.0
POLL_S = 0.1
ON_CPU = 2  # processes: enough for an all-reduce
SAID = 3  # lines of what failed that are shown
AGAIN = "python launch/doctor.py active=force"


def run(facts: Facts, force: bool) -> Outcome:
    """Start the processes and wait for what they write. Never raises for what they do."""
    if importlib.util.find_spec("torch") is None:
        return Outcome(not_run=(f"{sys.executable} has no torch", "make setup, then .venv/bin/python launch/doctor.py active=true"))
    if facts.hardware is None:
        return Outcome(not_run=("no group of conf/hardware fits, so nothing says what to expect", "name one: hardware=GROUP"))
    on_cpu = facts.hardware.vendor == Vendor.none
    if not on_cpu and not facts.gpus:
        return Outcome(not_run=("no GPU was found", "hardware=cpu tests processes and their all-reduce without one"))
    others = [] if force or on_cpu else _others(facts)
    if others:
        return Outcome(not_run=(f"the GPUs are in use: {'; '.join(others)}", f"wait for them, or test beside them: {AGAIN}"))
    try:
        config, gpus = _composed(facts)
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder, orphans.guarded(stop_timeout_s=1.0):
            return _watched(config, facts, gpus, force, Path(folder))
    except HostError as error:
        return Outcome(not_run=(str(error), "choose GPUs by index, or unset the mask"))


def _others(facts: Facts) -> list[str]:
    """Who uses the GPUs, by the checks that look at it."""
    found = (state.memory_occupied(facts), state.foreign_processes(facts))
    return [finding.read for finding in found if finding and finding.status in (Status.warn, Status.fail)]


def _composed(facts: Facts) -> tuple[Config, tuple[int, ...]]:
    """A composition that has a rank on each GPU, and which they are: those of the caller's mask, or all. Raises HostError."""
    assert facts.hardware is not None
    overrides = [f"hardware={facts.hardware.name}", "runtime=local", "topology=ddp"]
    if facts.hardware.vendor == Vendor.none:
        return compose([*overrides, f"topology.num_gpus={ON_CPU}"]), ()
    given = masks.given(masks.AMD if facts.is_amd else masks.NVIDIA, facts.host.environ)
    mask = next(iter(given.values()), None)
    of_maker = [gpu for gpu in facts.gpus if gpu.gfx.startswith("gfx") == (facts.hardware.vendor == Vendor.amd)]
    count = len(of_maker) if mask is None else len(mask.split(","))
    config = compose([*overrides, f"topology.num_gpus={count}"])
    return config, tuple(environment.visible_gpus(config, facts.host, count))


def dtype(config: Config) -> str:
    """The half precision that this hardware prefers; fp32 where it has no rate in one."""
    precisions = config.hardware.precisions
    return next((p for p in precisions if p in ("bf16", "fp16") and p in config.hardware.peak_tflops), "fp32")


def _process(config: Config, facts: Facts, gpus: tuple[int, ...], force: bool, folder: Path) -> Process:
    count = len(gpus) or ON_CPU
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(count)]
    given = ["--folder", str(folder), "--device", "cuda" if gpus else "cpu", "--dtype", dtype(config), *(["--force"] if force else [])]
    settings = {s.name: s for s in environment.settings(config, facts.host, "trainer", list(gpus), folder, count)}
    own = {
        "GLOO_SOCKET_IFNAME": ("lo", "the processes are all here, and a container may not know its own name"),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": ("5", "there is nothing to save"),
    }
    settings |= {name: Setting(name, value, reason, "launcher") for name, (value, reason) in own.items()}
    argv = [facts.host.python, *torchrun, "-m", PROGRAM, *given]
    return Process("health", "health", argv, list(settings.values()), list(gpus), count)


def _watched(config: Config, facts: Facts, gpus: tuple[int, ...], force: bool, folder: Path) -> Outcome:
    process, log = _process(config, facts, gpus, force, folder), folder / "log"
    began = time.monotonic()
    child = LocalProcess(process, log)
    console = Console(stderr=True)
    label = f"active tests: {process.num_ranks} {'GPU(s)' if gpus else 'processes on the CPU'}, at most {TIMEOUT_S:g} s"
    try:
        with console.status(label) as status:
            if not console.is_terminal:
                console.print(label, highlight=False, markup=False, soft_wrap=True)
            while (code := child.poll()) is None and time.monotonic() - began < TIMEOUT_S:
                time.sleep(POLL_S)
                status.update(f"{label}: {_phase(folder)}, {time.monotonic() - began:.0f} s")
    finally:
        child.remove()  # also of a doctor that is interrupted
    measured, unread = _read(folder, process.num_ranks)
    wrong = _wrong(code, measured, unread, log)
    again = f"run it by hand for all that it says: {_by_hand(process, folder)}"
    return Outcome(gpus, tuple(measured.values()), time.monotonic() - began, failed=(wrong, again) if wrong else None)


def _phase(folder: Path) -> str:
    """Where the first rank is."""
    try:
        return read(file_of(folder, 0)).phase
    except (OSError, ValueError):
        return "starting"


def _read(folder: Path, num_ranks: int) -> tuple[dict[int, Measured], dict[int, str]]:
    """What each rank wrote, and of those whose file cannot be read, why."""
    measured, unread = {}, {}
    for rank in range(num_ranks):
        try:
            measured[rank] = read(file_of(folder, rank))
        except FileNotFoundError:
            unread[rank] = "wrote nothing"
        except (OSError, ValueError) as error:
            unread[rank] = str(error)
    return measured, unread


def _wrong(code: int | None, measured: dict[int, Measured], unread: dict[int, str], log: Path) -> str | None:
    """What went wrong, in one line; None where every process did all of it. `code` None: the time was over."""
    at = {rank: f"was in {found.phase}" for rank, found in measured.items()} | unread
    where = ", ".join(f"process {rank} {at[rank]}" for rank in sorted(at))
    words = logs.last_words(log)
    said = f". Last lines: {' | '.join(line.strip()[:200] for line in words.lines[-SAID:])}" if words.lines else ""
    if code is None:
        return f"no end within {TIMEOUT_S:g} s, so it was killed: {where}{said}"
    if code:
        why = logs.killed_by(-words.exit_code) if words.exit_code is not None and words.exit_code < 0 else f"exit code {words.exit_code}"
        who = f"process {words.rank} ended first, {why}; " if words.rank is not None else ""
        return f"{who}{where}{said}"
    if unread:
        return "; ".join(f"process {rank}: {reason}" for rank, reason in unread.items())
    return None


def _by_hand(process: Process, folder: Path) -> str:
    """With a folder that outlives it."""
    argv = ["measured" if word == str(folder) else word for word in process.argv]
    mask = [f"{s.name}={s.value}" for s in process.settings if s.name in (*environment.MASK.values(), "GLOO_SOCKET_IFNAME")]
    return shlex.join([*mask, f"PYTHONPATH={environment.ROOT}", *argv])
