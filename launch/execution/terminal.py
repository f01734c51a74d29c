"""Run a method that talks to the user (method=chat) with this terminal's input and output."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.config.request import Request
from launch.core import docker_host
from launch.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER, HostError
from launch.execution import secret_files
from launch.execution.execute import check_host, handling, write_inputs
from launch.execution.local import environment
from launch.execution.mounted import on_host
from launch.machine.detect import Host
from launch.plan import predictions, rundir, show
from launch.plan.planning import make_plan, with_commits
from launch.schema import Config
from launch.schema.plan import ContainerSpec
from launch.search import fit

INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)  # exit codes after Ctrl-C, here and of docker


def run(config: Config, host: Host, warnings: Sequence[str], request: Request) -> int:
    """Run the method's process until the user ends it, and return the exit code.

    Under runtime=slurm, it runs on this machine. Its directory is temporary. Raises HostError.
    """
    runtime = dataclasses.replace(config.runtime, name=config.runtime.on_node)
    config = dataclasses.replace(config, runtime=runtime)
    with tempfile.TemporaryDirectory(prefix=f"{config.method.name}-") as folder:
        run_dir = Path(folder)
        plan = with_commits(make_plan(config, host, run_dir, warnings, request), host)
        show.print_warnings(config, plan.warnings)
        if predictions.download_gb(plan.config):  # a chat leaves no record of its commit
            model = plan.config.model
            show.say(config, f"model.hub_id={model.hub_id} model.revision={model.revision}")
        fit.admit(plan, host)
        image = check_host(plan, host)
        write_inputs(plan)
        process = plan.processes[-1]
        spec = plan.containers.get(process.name)
        secrets = spec.secrets if spec else []
        # The next launcher would remove the container of a run whose directory is not locked.
        with rundir.locked(run_dir), secret_files.written(secrets, host, run_dir):
            if spec and image and not spec.prefix:
                code = _attached_container(spec, str(image["id"]), host)
            else:
                process = on_host(process, spec) if spec else process
                code = _attached(process.argv, environment(process))
    if code in INTERRUPTED:  # while the model was loading
        return EXIT_INTERRUPTED
    return code if code in (0, EXIT_USER) else EXIT_FAILED


def _attached_container(spec: ContainerSpec, image_id: str, host: Host) -> int:
    """Run a container with this terminal and return its exit code. Raises HostError."""
    from launch.execution import docker_engine  # the import takes 0.25 s

    program = shutil.which("docker")
    if program is None:
        raise HostError(
            "runtime=docker: the program `docker` is missing, which connects this terminal to the "
            "container. Install it (Debian: apt-get install docker-cli), or use runtime=local."
        )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    spec = dataclasses.replace(spec, stdin=True, tty=is_terminal)
    container = docker_engine.create(docker_engine.connect(), spec, image_id, host)
    address = docker_host.address(os.environ)
    argv = [program, "--host", address, "start", "--attach", "--interactive", spec.name]
    try:
        return _attached(argv, os.environ)
    finally:
        docker_engine.remove(container)


def _attached(argv: list[str], env: Mapping[str, str]) -> int:
    def forward(number: int) -> None:
        if number != signal.SIGINT:  # the terminal sends Ctrl-C to the child anyway
            child.terminate()

    with subprocess.Popen(argv, env=env) as child, handling(forward):
        return child.wait()
