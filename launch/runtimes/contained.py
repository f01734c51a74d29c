"""runtime=docker: a process group in a container, behind the same few calls as one of this machine."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException, NotFound

from launch.errors import HostError
from launch.machine.detect import Host
from launch.runtimes import engine
from launch.runtimes.container import ContainerSpec
from launch.supervision import serving

KILLED = 137  # 128 + SIGKILL: the exit code where the engine states none
# Past a proxy that a secret names: it does not know this loopback.
ASK = """
import sys, urllib.request
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(direct.open(sys.argv[1], timeout=float(sys.argv[2])).read().decode(errors="replace"))
"""
# Ranks have a handler for it, which prints their stacks; it would end others.
SIGNAL_RANKS = """
import contextlib, os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    with contextlib.suppress(OSError):  # it has just ended; the others are asked all the same
        caught = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt:")]
        if caught and int(caught[0], 16) >> (signal.SIGUSR1 - 1) & 1:
            os.kill(int(status.parent.name), signal.SIGUSR1)
"""
LOST = "the engine stopped answering while this container ran; `docker ps -a` shows what is left of it"


class ContainedProcess:
    """A container from its creation to its removal. A thread copies its output into the log."""

    def __init__(self, client: docker.DockerClient, spec: ContainerSpec, image_id: str, host: Host, log: Path) -> None:
        self.spec, self.log = spec, log
        self.exit_code: int | None = None
        self.state: dict[str, Any] = {}
        _make_writable(spec)
        self.container = engine.create(client, spec, image_id, host)
        try:
            # Attached before it starts: nothing is missed, and the engine's rotation of its own log does not matter.
            self.output = self.container.attach(stdout=True, stderr=True, stream=True)
            self.container.start()
        except DockerException as error:
            engine.remove(self.container)
            raise HostError(f"the engine cannot start the container {spec.name}: {getattr(error, 'explanation', None) or error}") from error
        self.follower = threading.Thread(target=self._follow, daemon=True)
        self.follower.start()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.exit_code

    def ask_to_stop(self) -> None:
        """SIGTERM to the container's init, which passes it to torchrun, which passes it to the ranks."""
        if self.exit_code is None:
            with contextlib.suppress(DockerException):  # it ended in the meantime, or the engine is gone: the follower finds out which
                self.container.kill("SIGTERM")

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or the time is over."""
        self.follower.join(timeout_s)

    def remove(self) -> None:
        """Whatever is left of it, killed; then its log is complete."""
        try:
            if self.exit_code is None:
                self.container.kill("SIGKILL")
        except DockerException:
            self.state.setdefault("Error", LOST)
        self.follower.join(timeout=30)
        try:
            engine.remove(self.container)
        except (DockerException, requests.RequestException, HostError):
            self.state.setdefault("Error", LOST)  # the next start removes it, by its label

    def why(self) -> str | None:
        """What the engine or the kernel did to it, where its log cannot say."""
        if self.state.get("OOMKilled"):
            limit = f"its limit of {self.spec.memory_gb:g} GB (runtime.memory_gb)" if self.spec.memory_gb else "the memory of this host"
            return (
                f"killed for memory: it outgrew {limit}. A smaller per_device_train_batch_size or max_length, "
                "fewer dataloader workers, or a larger limit."
            )
        return self.state.get("Error") or None

    def ask(self, port: int, path: str) -> str:
        """What the server in it answers, asked from inside: its network is its own. Raises OSError."""
        if self.spec.network == "host":
            return serving.get(port, path)
        try:
            done = self.container.exec_run(["python3", "-c", ASK, f"http://127.0.0.1:{port}{path}", str(serving.answer_within_s(path))])
        except (DockerException, requests.RequestException) as error:
            raise OSError(str(error)) from error
        answer = str(done.output.decode(errors="replace"))
        if done.exit_code != 0:
            raise OSError(answer)
        return answer

    def dump_stacks(self, folder: Path) -> None:
        """Its ranks write their stacks into their logs: py-spy may not look into a container from outside, nor without CAP_SYS_PTRACE.

        Raises OSError.
        """
        try:
            done = self.container.exec_run(["python3", "-c", SIGNAL_RANKS])
        except (DockerException, requests.RequestException) as error:
            raise OSError(str(error)) from error
        if done.exit_code != 0:
            raise OSError(done.output.decode(errors="replace").strip())

    def _follow(self) -> None:
        """Log lines until the container ends, then how it ended. Whatever happens, the launcher learns that it is over."""
        exit_code = KILLED
        try:
            self._copy_output()
            exit_code = int(self.container.wait()["StatusCode"])
            self.container.reload()
            self.state = dict(self.container.attrs["State"])
        except NotFound:
            self.state = {"Error": "somebody removed the container while it ran"}
        except (DockerException, requests.RequestException):
            self.state = {"Error": LOST}
        except OSError as error:
            self.state = {"Error": f"{self.log} cannot be written ({error.strerror})"}
        finally:
            self.exit_code = exit_code

    def _copy_output(self) -> None:
        with self.log.open("ab") as file:
            for chunk in self.output:
                file.write(chunk)
                file.flush()


def _make_writable(spec: ContainerSpec) -> None:
    """Folders that the engine would make, as root's. Raises HostError."""
    for mount in spec.mounts:
        if not mount.read_only:
            try:
                Path(mount.source).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise HostError(f"{mount.source} ({mount.reason}) cannot be made: {error.strerror}.") from error
