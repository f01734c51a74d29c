"""runtime=docker: a process group in a container, behind the same few calls as one of this machine."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException, NotFound
from rich.console import Console
from rich.text import Text

from launch import engine
from launch.container import ContainerSpec
from launch.errors import HostError

LOST = "the engine stopped answering while this container ran; `docker ps -a` shows what is left of it"


class ContainedProcess:
    """A container from its creation to its removal. A thread follows its log to the file and to the terminal."""

    def __init__(self, client: docker.DockerClient, spec: ContainerSpec, name: str, log: Path, console: Console) -> None:
        self.spec, self.name, self.log, self.console = spec, name, log, console
        self.exit_code: int | None = None
        self.state: dict[str, Any] = {}
        self.asked = self.silent = False
        for mount in spec.mounts:
            if not mount.read_only:
                Path(mount.source).mkdir(parents=True, exist_ok=True)  # by the engine it would be root's
        self.container = engine.create(client, spec)
        try:
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
            self.asked = True
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
            engine.remove(self.container, grace_s=0)
        except (DockerException, requests.RequestException):
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

    def _follow(self) -> None:
        """Log lines until the container ends, then how it ended."""
        try:
            with self.log.open("ab") as file:
                rest = b""
                for chunk in self.container.logs(stream=True, follow=True):
                    file.write(chunk)
                    file.flush()
                    *lines, rest = (rest + chunk).split(b"\n")
                    self._say(lines)
                self._say([rest] if rest else [])
            exit_code = int(self.container.wait()["StatusCode"])
            self.container.reload()
            self.state = dict(self.container.attrs["State"])
            self.exit_code = exit_code
        except NotFound:
            self.state, self.exit_code = {"Error": "somebody removed the container while it ran"}, 137
        except (DockerException, requests.RequestException):
            self.state, self.exit_code = {"Error": LOST}, 137

    def _say(self, lines: list[bytes]) -> None:
        for line in lines:
            # torchrun reports the signal that we sent as a traceback; the log has it.
            self.silent |= self.asked and line.startswith(b"Traceback ")
            if self.silent:
                return
            text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]  # of a moving line, what it says last
            self.console.print(Text(f"{self.name} | {text}"), soft_wrap=True)
