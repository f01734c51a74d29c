"""Run a process group on another node of a Slurm job, as a step of the job."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch.core.errors import HostError
from launch.execution import orphans, server_client
from launch.execution.local import LocalProcess
from launch.plan import container_argv
from launch.plan.container import image_reference
from launch.plan.views import image_json
from launch.schema import Config
from launch.schema.plan import Process

PYXIS = "--container-image"  # srun's option, which the plugin adds
JOB_PROGRAM = Path(__file__).with_name("slurm_job.py")
STACKS_S = 2.0  # until the stacks arrive over the network


class NodeProcess(LocalProcess):
    """A GroupHandle for an srun on this machine, which runs the group on another node.

    On SIGTERM, srun kills its step immediately, so the supervisor signals it only after the first
    node's ranks have saved and exited.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.server, self.name = process.server, process.name
        # srun needs the variables of the job.
        super().__init__(dataclasses.replace(process, inherited=[*os.environ]), log)

    def query(self, port: int, path: str) -> str:
        return server_client.get(port, path, self.server)

    def dump_stacks(self, folder: Path) -> None:
        """Send SIGUSR1 to srun, which forwards it to the ranks; they print into their logs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGUSR1)
        self.wait(STACKS_S)


class PyxisProcess(NodeProcess):
    """A GroupHandle for an srun that runs the group in a container, on any node."""

    def terminate(self) -> None:
        """Signal the tasks of the step. srun would kill them, also on the first node."""
        argv = ["squeue", "--steps", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}"]
        argv.append("--format=%i %j")
        for line in subprocess.run(argv, capture_output=True, text=True).stdout.splitlines():
            number, name = line.split()
            if name == self.name:
                subprocess.run(["scancel", "--signal=TERM", number])


def check_pyxis(config: Config) -> dict[str, Any]:
    """Return the image's facts for the record. Raises HostError without pyxis or a registry."""
    reference, image = image_reference(config), image_json(config) or {}
    usage = ""
    with contextlib.suppress(OSError):  # srun is missing
        usage = subprocess.run(["srun", "--help"], capture_output=True, text=True).stdout
    if PYXIS not in usage:
        raise HostError(
            f"runtime.slurm.container=pyxis: srun of this machine has no {PYXIS}, so the plugin "
            "pyxis is missing. Use: runtime.slurm.container=apptainer, or none."
        )
    if image["name"] != "custom" and "@" not in reference:
        raise HostError(
            f"container={image['name']}: {reference} is in no registry, so nodes cannot get it. "
            f"Use: python containers/build.py image={image['name']} push=<registry/repository>, or "
            "container=custom container.reference=<file.sqsh>."
        )
    base = {"name": str(image.get("base", "")).partition("@")[0]}
    return {"id": reference, "repo_digests": [reference], "base": base}


def step(run_dir: Path, process: Process) -> Process:
    """Return the srun that runs JOB_PROGRAM for the process on its node.

    The other node computes the settings and what its ranks inherit.
    """
    # Remove the marker, which contains the launcher's pid on this machine. On the other node, the
    # process would look like an orphan.
    unmarked = ["env", "-u", orphans.LAUNCHER, "-u", orphans.PROCESS]
    program = [sys.executable, str(JOB_PROGRAM), str(run_dir), process.name]
    argv = [*container_argv.srun(process), "--export=ALL", *unmarked, *program]
    return dataclasses.replace(process, argv=argv, settings=[])
