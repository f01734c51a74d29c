"""A process group on another node of a Slurm job: a step of the job, behind the same few calls as a process of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path

from launch.runtimes.local import LocalProcess
from launch.supervision import orphans
from launch.topology import Process

JOB_PROGRAM = Path(__file__).with_name("slurm_job.py")
TAKES_USR1_S = 2.0  # ranks print their stacks at once; their lines come over the network


class NodeProcess(LocalProcess):
    """srun here. SIGTERM has it kill the step there at once: only after the first node's ranks have ended, and with them the save."""

    def __init__(self, run_dir: Path, process: Process, log: Path) -> None:
        # The settings are computed there: they follow from that node's GPUs and cores.
        super().__init__(dataclasses.replace(process, argv=step(run_dir, process), settings=[]), log)

    def dump_stacks(self, folder: Path) -> None:
        """srun passes the signal to every process of the step; ranks have a handler that prints their stacks into their logs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGUSR1)
        self.wait(TAKES_USR1_S)


def step(run_dir: Path, process: Process) -> list[str]:
    """srun of one task on the process's node, with all the cores that the job has there."""
    srun = ["srun", "--nodes=1", "--ntasks=1", f"--relative={process.node}", "--cpu-bind=none", "--export=ALL", "--unbuffered"]
    # The mark names a launcher by its pid on this machine; over there it would pass for an orphan's.
    unmarked = ["env", "-u", orphans.LAUNCHER, "-u", orphans.PROCESS]
    return [*srun, f"--job-name={process.name}", *unmarked, sys.executable, str(JOB_PROGRAM), str(run_dir), process.name]
