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
TAKES_USR1_S = 2.0  # ranks print their stacks at once, but their lines come over the network


class NodeProcess(LocalProcess):
    """An srun on this machine, as a process group (Started).

    On SIGTERM, srun kills the step at once. So send it only after the first node's ranks have saved
    and ended.
    """

    def __init__(self, run_dir: Path, process: Process, log: Path) -> None:
        # The settings are computed on that node, because they follow from its GPUs and cores.
        srun = dataclasses.replace(process, argv=step(run_dir, process), settings=[])
        super().__init__(srun, log)

    def dump_stacks(self, folder: Path) -> None:
        """Signal srun, which signals every process of the step; ranks print into their logs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGUSR1)
        self.wait(TAKES_USR1_S)


def step(run_dir: Path, process: Process) -> list[str]:
    """Return the srun command of one task on the process's node, with all the job's cores there."""
    srun = ["srun", "--nodes=1", "--ntasks=1", f"--relative={process.node}"]
    srun += ["--cpu-bind=none", "--export=ALL", "--unbuffered", f"--job-name={process.name}"]
    # The mark names a launcher by its pid on this machine. On the other node the process would pass
    # for an orphan.
    unmarked = ["env", "-u", orphans.LAUNCHER, "-u", orphans.PROCESS]
    return [*srun, *unmarked, sys.executable, str(JOB_PROGRAM), str(run_dir), process.name]
