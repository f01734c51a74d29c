"""Run a process group on another node of a Slurm job, as a step of the job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path

from launch.execution import orphans
from launch.execution.local import LocalProcess
from launch.schema.plan import Process

JOB_PROGRAM = Path(__file__).with_name("slurm_job.py")
STACKS_S = 2.0  # until the stacks arrive over the network


class NodeProcess(LocalProcess):
    """A GroupHandle for an srun on this machine, which runs the group on another node.

    On SIGTERM, srun kills its step immediately, so the supervisor signals it only after the first
    node's ranks have saved and exited.
    """

    def __init__(self, run_dir: Path, process: Process, log: Path) -> None:
        # The other node computes the settings and what its ranks inherit. srun needs everything.
        argv = step(run_dir, process)
        srun = dataclasses.replace(process, argv=argv, settings=[], inherited=[*os.environ])
        super().__init__(srun, log)

    def dump_stacks(self, folder: Path) -> None:
        """Send SIGUSR1 to srun, which forwards it to the ranks; they print into their logs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGUSR1)
        self.wait(STACKS_S)


def step(run_dir: Path, process: Process) -> list[str]:
    """Return an srun command that runs the process on its node with all of the job's cores."""
    srun = ["srun", "--nodes=1", "--ntasks=1", f"--relative={process.node}"]
    srun += ["--cpu-bind=none", "--export=ALL", "--unbuffered", f"--job-name={process.name}"]
    # Remove the marker, which contains the launcher's pid on this machine. On the other node, the
    # process would look like an orphan.
    unmarked = ["env", "-u", orphans.LAUNCHER, "-u", orphans.PROCESS]
    return [*srun, *unmarked, sys.executable, str(JOB_PROGRAM), str(run_dir), process.name]
