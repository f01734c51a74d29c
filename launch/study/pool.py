"""Place trials: the GPUs that each one gets, and its process."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from launch.machine import masks
from launch.machine.detect import Host
from launch.machine.placement import MASK
from launch.plan.process_env import ROOT
from launch.study.trials import Prepared

RUN = ROOT / "launch/run.py"


def blocks(gpus: list[int], size: int) -> list[list[int]]:
    """Return the GPUs of the trials of `size` GPUs that may run together; one trial needs no GPU.

    Blocks begin at multiples of `size`, so trials of one size leave no gaps and linked GPUs stay
    together.
    """
    if not 0 < size <= len(gpus):  # a trial's own launcher rejects more GPUs than there are
        return [[]]
    return [gpus[at : at + size] for at in range(0, len(gpus) - size + 1, size)]


def at_once(gpus: list[int], size: int, parallel: int | None) -> int:
    """Return how many trials of `size` GPUs run together; without GPUs, one by default."""
    return min(len(blocks(gpus, size)), parallel or len(gpus)) if size else parallel or 1


def environment_of(
    trial: Prepared, gpus: list[int], num_parallel: int, host: Host
) -> dict[str, str]:
    """Return a trial's variables on top of the user's environment: its GPUs, its share of cores."""
    config = trial.plans[0].config
    if config.runtime.name == "slurm":  # it runs on another machine, with other GPUs and cores
        return {}
    mask = MASK.get(config.hardware.vendor)
    env = {mask: ",".join(map(str, gpus))} if mask and gpus else {}
    if num_parallel > 1 and "OMP_NUM_THREADS" not in host.environ:
        ranks = max(process.num_ranks for plan in trial.plans for process in plan.processes)
        env["OMP_NUM_THREADS"] = str(max(1, host.num_cores // num_parallel // ranks))
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
