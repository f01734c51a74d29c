"""Run a process group in a container (runtime=docker)."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException, NotFound

from launch.core.errors import HostError
from launch.execution import docker_engine, server_client
from launch.machine.detect import Host
from launch.schema.plan import ContainerSpec

KILLED = 137  # 128 + SIGKILL: the exit code if the engine reports none
# Do not use a proxy that a secret may name, because it cannot reach this loopback.
ASK = """
import sys, urllib.request
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(direct.open(sys.argv[1], timeout=float(sys.argv[2])).read().decode(errors="replace"))
"""
# Ranks have a handler for SIGUSR1, which prints their stacks. The signal would end other processes.
SIGNAL_RANKS = """
import contextlib, os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    with contextlib.suppress(OSError):  # it has just ended
        caught = status.read_text().partition("SigCgt:")[2].split()
        if caught and int(caught[0], 16) >> (signal.SIGUSR1 - 1) & 1:
            os.kill(int(status.parent.name), signal.SIGUSR1)
"""
LOST = "the engine stopped answering while this container ran; `docker ps -a` may still list it"


class ContainedProcess:
    """A process group (Started) in a container, from creation to removal.

    A thread copies the container's output into the log.
    """

    def __init__(
        self, client: docker.DockerClient, spec: ContainerSpec, image_id: str, host: Host, log: Path
    ) -> None:
        self.spec, self.log = spec, log
        self.exit_code: int | None = None
        self.state: dict[str, Any] = {}
        for mount in spec.mounts:  # the engine would create missing folders as root
            if not mount.read_only:
                Path(mount.source).mkdir(parents=True, exist_ok=True)
        self.container = docker_engine.create(client, spec, image_id, host)
        try:
            with docker_engine.host_errors(f"container {spec.name}: "):
                # Attach before the start, so that no output is missed and the engine's log
                # rotation does not matter.
                self.output = self.container.attach(stdout=True, stderr=True, stream=True)
                self.container.start()
        except HostError:
            docker_engine.remove(self.container)
            raise
        self.follower = threading.Thread(target=self.follow, daemon=True)
        self.follower.start()

    def poll(self) -> int | None:
        return self.exit_code

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the container's init, which passes it to torchrun and the ranks."""
        if self.exit_code is None:
            # If it has just ended or the engine is gone, the follower finds out which.
            with contextlib.suppress(DockerException):
                self.container.kill("SIGTERM")

    def wait(self, timeout_s: float) -> None:
        self.follower.join(timeout_s)

    def remove(self) -> None:
        """Kill what is left of the container, which completes its log."""
        try:
            if self.exit_code is None:
                self.container.kill("SIGKILL")
        except DockerException:
            self.state.setdefault("Error", LOST)
        self.follower.join(timeout=30)
        try:
            docker_engine.remove(self.container)
        except (DockerException, requests.RequestException, HostError):
            self.state.setdefault("Error", LOST)  # the next start removes it by its label

    def why(self) -> str | None:
        if not self.state.get("OOMKilled"):
            return self.state.get("Error") or None
        limit = "the memory of this host"
        if self.spec.memory_gb:
            limit = f"its limit of {self.spec.memory_gb:g} GB (runtime.memory_gb)"
        return (
            f"killed for memory: it exceeded {limit}. Use a smaller "
            "per_device_train_batch_size or max_length, "
            "fewer dataloader workers, or a larger limit."
        )

    def ask(self, port: int, path: str) -> str:
        """Return a server's answer, by a request from inside unless the network is the host's."""
        if self.spec.network == "host":
            return server_client.get(port, path)
        url = f"http://127.0.0.1:{port}{path}"
        return self.python(ASK, url, str(server_client.ANSWERS_WITHIN_S))

    def dump_stacks(self, folder: Path) -> None:
        """Make ranks write their stacks into their logs.

        py-spy may not look into a container from outside, nor inside without CAP_SYS_PTRACE.
        """
        self.python(SIGNAL_RANKS)

    def python(self, program: str, *arguments: str) -> str:
        """Run a Python program inside the container and return its output. Raises OSError."""
        try:
            done = self.container.exec_run(["python3", "-c", program, *arguments])
            failed, answer = done.exit_code != 0, str(done.output.decode(errors="replace"))
        except (DockerException, requests.RequestException) as error:
            failed, answer = True, str(error)
        if failed:
            raise OSError(answer.strip())
        return answer

    def follow(self) -> None:
        """Copy log lines until the container ends, then record how it ended.

        Whatever happens, set the exit code.
        """
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
