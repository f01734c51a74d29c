"""Place trials: the GPUs that each one gets, and its process."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from launch.machine import masks
from launch.machine.detect import Host
from launch.machine.placement import MASK
from launch.plan.environment import ROOT
from launch.study.trials import Prepared

RUN = ROOT / "launch/run.py"


def pack(gpus: list[int], busy: Collection[int], wanted: int) -> list[int] | None:
    """Return the first free block of `wanted` neighbouring GPUs; None if the trial has to wait.

    Blocks begin at multiples of `wanted`, so trials of one size leave no gaps and linked GPUs stay
    together.
    """
    for start in range(0, len(gpus) - wanted + 1, wanted):
        block = gpus[start : start + wanted]
        if not set(block) & set(busy):
            return block
    return None


def at_once(gpus: list[int], wanted: int, parallel: int | None) -> int:
    """Return how many trials of `wanted` GPUs run together; without GPUs, one by default."""
    if not wanted:
        return parallel or 1
    return max(1, min(len(gpus) // wanted, parallel or len(gpus)))


def environment_of(trial: Prepared, gpus: list[int], together: int, host: Host) -> dict[str, str]:
    """Return a trial's variables on top of the user's environment: its GPUs, its share of cores."""
    config = trial.plans[0].config
    if config.runtime.name == "slurm":  # it runs on another machine, with other GPUs and cores
        return {}
    mask = MASK.get(config.hardware.vendor)
    env = {mask: ",".join(map(str, gpus))} if mask and gpus else {}
    if together > 1 and "OMP_NUM_THREADS" not in host.environ:
        ranks = max(process.num_ranks for plan in trial.plans for process in plan.processes)
        env["OMP_NUM_THREADS"] = str(max(1, host.num_cores // together // ranks))
    return env


def typed(overrides: list[str]) -> str:
    """Return the command of a run as a person would type it."""
    return shlex.join(["python", "launch/run.py", *overrides])


def start(overrides: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `python launch/run.py` in its own session, so that Ctrl-C reaches only the sweep.

    However the sweep dies, the kernel then sends SIGTERM to its trials, which save and end with 75.
    """
    tie = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
    with log.open("ab") as file:
        settings = [f"{name}={value}" for name, value in env.items()]
        file.write(" ".join(["$", *settings, typed(overrides)]).encode() + b"\n")
        file.flush()
        return subprocess.Popen(
            [*tie, sys.executable, str(RUN), *overrides],
            env=masks.inherited(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
