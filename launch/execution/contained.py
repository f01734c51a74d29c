"""Run a process group in a container (runtime=docker)."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException, NotFound

from launch.core.errors import HostError
from launch.execution import docker_engine, logs, server_client
from launch.machine.detect import Host
from launch.schema.plan import ContainerSpec

KILLED = 137  # 128 + SIGKILL, the exit code if the engine does not report one
# A proxy from the secrets cannot reach the container's loopback, so bypass it.
QUERY_PROGRAM = """
import sys, urllib.request
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(direct.open(sys.argv[1], timeout=float(sys.argv[2])).read().decode(errors="replace"))
"""
# Signal only processes that handle SIGUSR1. Ranks print their stacks; it would kill others.
SIGNAL_RANKS_PROGRAM = """
import contextlib, os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    with contextlib.suppress(OSError):  # the process has just exited
        caught = status.read_text().partition("SigCgt:")[2].split()
        if caught and int(caught[0], 16) >> (signal.SIGUSR1 - 1) & 1:
            os.kill(int(status.parent.name), signal.SIGUSR1)
"""
LOST = "lost contact with the engine while this container ran; `docker ps -a` may still list it"


class ContainedProcess:
    """A GroupHandle for processes in a container. A thread copies their output into the log."""

    def __init__(
        self, client: docker.DockerClient, spec: ContainerSpec, image_id: str, host: Host, log: Path
    ) -> None:
        self.spec, self.log = spec, log
        self.exit_code: int | None = None
        self.state: dict[str, Any] = {}
        self.container = docker_engine.create(client, spec, image_id, host)
        try:
            with docker_engine.host_errors(f"container {spec.name}: "):
                # Attach before the start, because the engine's log may have been rotated.
                self.output = self.container.attach(stdout=True, stderr=True, stream=True)
                self.container.start()
        except HostError:
            docker_engine.remove(self.container)
            raise
        self.follower = threading.Thread(target=self.follow, daemon=True)
        self.follower.start()

    def poll(self) -> int | None:
        return self.exit_code

    def terminate(self) -> None:
        """Send SIGTERM to the container's init, which passes it to torchrun and the ranks."""
        if self.exit_code is None:
            # On an error, the container or the engine is gone. The follower records which.
            with contextlib.suppress(DockerException):
                self.container.kill("SIGTERM")

    def wait(self, timeout_s: float) -> None:
        self.follower.join(timeout_s)

    def remove(self) -> None:
        """Kill the container, wait for the rest of its output, and remove it."""
        try:
            if self.exit_code is None:
                self.container.kill("SIGKILL")
        except DockerException:
            self.state.setdefault("Error", LOST)
        self.follower.join(timeout=30)
        try:
            docker_engine.remove(self.container)
        except (DockerException, requests.RequestException, HostError):
            self.state.setdefault("Error", LOST)  # the next launcher removes it

    def end_reason(self) -> str | None:
        if not self.state.get("OOMKilled"):
            number = (self.exit_code or 0) - 128  # as shells and docker's init report a signal
            return self.state.get("Error") or (logs.killed_by(number) if number > 0 else None)
        limit = "the memory of this host"
        if self.spec.memory_gb:
            limit = f"its limit of {self.spec.memory_gb:g} GB (runtime.memory_gb)"
        return (
            f"killed because it exceeded {limit}. Lower method.args.per_device_train_batch_size, "
            "method.args.max_length or hardware.dataloader.num_workers, or raise runtime.memory_gb."
        )

    def query(self, port: int, path: str) -> str:
        """Return a server's answer. Send the request from inside unless network=host."""
        if self.spec.network == "host":
            return server_client.get(port, path)
        url = f"http://127.0.0.1:{port}{path}"
        return self.python(QUERY_PROGRAM, url, str(server_client.TIMEOUT_S))

    def dump_stacks(self, folder: Path) -> None:
        """Make ranks write their stacks into their logs.

        py-spy cannot, because it needs CAP_SYS_PTRACE in the container.
        """
        self.python(SIGNAL_RANKS_PROGRAM)

    def python(self, program: str, *arguments: str) -> str:
        """Run a Python program inside the container and return its output. Raises OSError."""
        try:
            result = self.container.exec_run(["python3", "-c", program, *arguments])
        except (DockerException, requests.RequestException) as error:
            raise OSError(str(error)) from error
        output = str(result.output.decode(errors="replace"))
        if result.exit_code != 0:
            raise OSError(output.strip())
        return output

    def follow(self) -> None:
        """Copy output to the log until the container exits, then set its state and exit code."""
        exit_code = KILLED
        try:
            with self.log.open("ab") as file:
                for chunk in self.output:
                    file.write(chunk)
                    file.flush()
            exit_code = int(self.container.wait()["StatusCode"])
            self.container.reload()
            self.state = dict(self.container.attrs["State"])
        except NotFound:
            self.state = {"Error": "the container was removed while it ran"}
        except (DockerException, requests.RequestException):
            self.state = {"Error": LOST}
        except OSError as error:
            self.state = {"Error": f"{self.log} cannot be written ({error.strerror})"}
        finally:
            self.exit_code = exit_code
