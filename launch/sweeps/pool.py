"""Where trials run: which GPUs each is given, and its process."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from launch.environment import MASK, ROOT
from launch.machine import masks
from launch.machine.detect import Host
from launch.sweeps.trials import Prepared

RUN = ROOT / "launch/run.py"


def pack(gpus: list[int], busy: Collection[int], wanted: int) -> list[int] | None:
    """The first whole block of `wanted` neighbours of which none is busy; None where a trial has to wait.

    Blocks begin at multiples of `wanted`, so trials of one size leave no gaps, and GPUs that are linked stay together.
    """
    starts = range(0, len(gpus) - wanted + 1, wanted)
    return next((block for block in (gpus[i : i + wanted] for i in starts) if not set(block) & set(busy)), None)


def at_once(gpus: list[int], wanted: int, parallel: int | None) -> int:
    """How many trials of `wanted` GPUs run at the same time. Those that take no GPU: one, unless `parallel` says otherwise."""
    if not wanted:
        return parallel or 1
    return max(1, min(len(gpus) // wanted, parallel or len(gpus)))


def environment_of(trial: Prepared, gpus: list[int], together: int, host: Host) -> dict[str, str]:
    """What a trial's launcher finds in its shell beside the user's own: its GPUs, and its share of the cores."""
    config = trial.plans[0].config
    if config.runtime.name == "slurm":  # it runs on another machine, with GPUs and cores of its own
        return {}
    mask = MASK.get(config.hardware.vendor)
    found = {mask: ",".join(map(str, gpus))} if mask and gpus else {}
    if together > 1 and "OMP_NUM_THREADS" not in host.environ:
        found["OMP_NUM_THREADS"] = str(max(1, host.num_cores // together // trial.num_ranks))
    return found


def argv(overrides: list[str]) -> list[str]:
    return [sys.executable, str(RUN), *overrides]


def typed(overrides: list[str]) -> str:
    """The same as a person types it."""
    return shlex.join(["python", "launch/run.py", *overrides])


class TrialProcess:
    """`python launch/run.py` in a session of its own: Ctrl-C reaches the sweep only, which then lets every trial save."""

    def __init__(self, overrides: list[str], env: dict[str, str], log: Path) -> None:
        # When the sweep dies, however it dies, the kernel sends SIGTERM: the trial saves and ends with 75.
        tied: list[str] = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        options: dict[str, Any] = {"stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with log.open("ab") as file:
            file.write(" ".join(["$", *(f"{name}={value}" for name, value in env.items()), typed(overrides)]).encode() + b"\n")
            file.flush()
            self.child = subprocess.Popen([*tied, *argv(overrides)], env=masks.inherited(env), stdout=file, **options)

    def poll(self) -> int | None:
        return self.child.poll()

    def ask_to_stop(self) -> None:
        self.child.terminate()
