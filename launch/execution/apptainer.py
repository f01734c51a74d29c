"""Convert images for Apptainer, check them, and run process groups in them (runtime=apptainer).

launch/plan/container_argv.py renders the command.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch.core.errors import HostError
from launch.execution.local import LocalProcess
from launch.machine.detect import Host
from launch.plan import tools
from launch.plan.container import image_reference
from launch.plan.container_argv import sif
from launch.schema.plan import Plan


class ApptainerProcess(LocalProcess):
    """A GroupHandle for a container of Apptainer."""

    def terminate(self) -> None:
        """Signal Apptainer, which forwards SIGTERM. A second signal would interrupt a save."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGTERM)


def check(plan: Plan, host: Host) -> dict[str, Any]:
    """Convert the image if necessary, check it, and return its facts for the record."""
    # The import takes 0.25 s.
    from launch.execution import docker_engine

    file = convert(plan, host)
    inspected = json.loads(_output("inspect", "--json", "--labels", str(file)))
    labels = inspected["data"]["attributes"].get("labels") or {}
    reference = image_reference(plan.config)
    facts = docker_engine.image_facts(str(file), [reference] * ("@" in reference), labels)
    docker_engine.check_image(plan, facts)
    tools.check(plan.config, lambda argv: _output("exec", "--no-privs", str(file), *argv))
    return facts


def convert(plan: Plan, host: Host) -> Path:
    """Return the run's image as a file for Apptainer; create it if it does not exist."""
    config, reference = plan.config, image_reference(plan.config)
    file = sif(config, host, reference)
    if shutil.which("apptainer") is None:
        raise HostError(
            "runtime=apptainer: the program `apptainer` is not on the PATH. Use: "
            "`module load apptainer` or apptainer.org's packages, or another runtime."
        )
    if file.exists():
        return file
    if reference.startswith("/"):
        raise HostError(f"container.reference={reference}: no such file or directory.")
    # Only the docker engine of this machine has an image that was built and not pushed.
    is_pushed = "@" in reference or config.container.name == "custom"
    source = f"{'docker' if is_pushed else 'docker-daemon'}:{'//' * is_pushed}{reference}"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}.partial")
    print(f"converting {reference} for Apptainer, which takes minutes: {file}", file=sys.stderr)
    try:
        # Its progress goes to the terminal.
        argv = ["apptainer", "build", str(unfinished), source]
        with subprocess.Popen(argv, stdout=sys.stderr) as child:
            try:
                code = child.wait()
            except BaseException:  # an interrupt
                child.terminate()  # it removes gigabytes of temporary files before it ends
                child.wait()
                raise
        if code:
            name = config.container.name
            build = f"python containers/build.py image={name}; or " * (not is_pushed)
            raise HostError(
                f"container={name}: `apptainer build` of {source} failed. Use: {build}a converted "
                "file on a file system that the nodes see, with container=custom "
                "container.reference=<file.sif>."
            )
        unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def _output(*arguments: str) -> str:
    done = subprocess.run(["apptainer", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise HostError(f"apptainer {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout
