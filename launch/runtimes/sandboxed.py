"""The sandbox while a run lasts: its containers, and the socket between them and the ranks.

Imported only where a composition tests code. A container that ends, whatever a job has done to it, is replaced, and that job fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException
from docker.utils.socket import STDOUT, frames_iter

from containers import engine as images_engine
from containers import images
from containers.images import LABEL
from launch.errors import HostError
from launch.machine.detect import Host
from launch.plan import Plan
from launch.runtimes import engine
from launch.runtimes.container import ContainerSpec, container_name
from launch.topology import Process

SOCKET = "sandbox.sock"  # recipes/common/verify_code.py connects
READY_WITHIN_S = 60.0
GRACE_S = 10.0  # beyond a job's own time: to start and end its processes on a busy machine
WENT = "the sandbox ended while it ran this"


def image_id(client: docker.DockerClient) -> str:
    """Of the image `sandbox`. Raises HostError."""
    image = images.load()["sandbox"]
    with engine.told():
        found = images_engine.find(client, image.reference)
    if found is None:
        raise HostError(
            f"method.rewards.code_tests runs code in the image {image.reference}, which is not on this machine: "
            "python containers/build.py image=sandbox"
        )
    return str(found.id)


class Worker:
    """One container, which is made anew when it has ended. Raises HostError where it cannot be made."""

    def __init__(self, client: docker.DockerClient, spec: ContainerSpec, image: str, host: Host, log: Path, job_s: float) -> None:
        self.client, self.spec, self.image, self.host, self.log, self.job_s = client, spec, image, host, log, job_s
        self.restarts, self.closed = -1, False
        self.start()

    def start(self) -> None:
        self.restarts += 1
        self.container = engine.create(self.client, self.spec, self.image, self.host)
        if self.closed:  # meanwhile, and what close() has removed was the one before
            self.end()
            return
        try:
            with engine.told():
                self.stream = self.container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
                self.answers = self._lines()
                self.container.start()
            ready = self._answer(READY_WITHIN_S)
            if ready is None:
                raise HostError(f"the container {self.spec.name} does not start; {self.log} says more.")
        except HostError:
            self.end()
            raise
        self.languages = ready["languages"]

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The verdict. Raises HostError where the container ended and cannot be replaced."""
        with contextlib.suppress(OSError):  # it has ended: there is no answer either
            self.stream._sock.sendall(json.dumps(job).encode() + b"\n")
        verdict = self._answer(self.job_s + GRACE_S)
        if verdict is None:
            self.end()
            if not self.closed:
                self.start()
            return {"passed": 0, "total": len(job["tests"]), "error": WENT}
        return verdict

    def close(self) -> None:
        """End it for good, though a job of it may still be waited for."""
        self.closed = True
        self.end()

    def end(self) -> None:
        with contextlib.suppress(DockerException, requests.RequestException, HostError):  # the next start removes it, by its label
            self.container.remove(force=True)

    def _answer(self, within_s: float) -> dict[str, Any] | None:
        """None where the container has ended, or had to be because it said nothing in time."""
        timer = threading.Timer(within_s, self.end)
        timer.start()
        try:
            line = next(self.answers, None)
            return None if line is None else dict(json.loads(line))
        finally:
            timer.cancel()

    def _lines(self) -> Any:
        """What the container's first process says; its stderr goes to the log."""
        rest = b""
        with contextlib.suppress(OSError), self.log.open("ab") as log:
            for kind, data in frames_iter(self.stream, tty=False):
                if kind != STDOUT:
                    log.write(data)
                    log.flush()
                    continue
                *whole, rest = (rest + data).split(b"\n")
                yield from whole


class SandboxProcess:
    """All of them behind the same few calls as any process group. Ready once it is made. Raises HostError."""

    def __init__(self, client: docker.DockerClient, plan: Plan, process: Process, host: Host, log: Path) -> None:
        spec, run_dir, job_s = plan.containers[process.name], plan.run_dir, plan.config.method.sandbox.time_s
        assert spec.confinement is not None
        self.broken: str | None = None
        self.ended = threading.Event()
        image = image_id(client)
        self.workers: list[Worker] = []
        self.server: _Server | None = None
        self.pool = ThreadPoolExecutor(spec.confinement.copies)
        copies = [f"{process.name}-{i}" for i in range(spec.confinement.copies)]
        specs = [
            dataclasses.replace(spec, name=container_name(run_dir, name), labels={**spec.labels, f"{LABEL}.process": name})
            for name in copies
        ]
        try:
            started = [self.pool.submit(Worker, client, each, image, host, log, job_s) for each in specs]
            wait(started)
            self.workers = [future.result() for future in started if not future.exception()]  # those to remove where one fails
            for future in started:
                future.result()
            self.idle: queue.Queue[Worker] = queue.Queue()
            for worker in self.workers:
                self.idle.put(worker)
            self.server = _listen(run_dir, self)
        except BaseException:
            self.remove()
            raise
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        with log.open("a") as file:
            file.write(f"{len(self.workers)} containers; languages: {', '.join(self.workers[0].languages)}\n")

    def judge(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(self.pool.map(self._judge, jobs))

    def _judge(self, job: dict[str, Any]) -> dict[str, Any]:
        worker = self.idle.get()
        try:
            return worker.run(job)
        except HostError as error:
            self.broken = str(error)
            raise
        finally:
            self.idle.put(worker)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.broken:
            return 1
        return 0 if self.ended.is_set() else None

    def ask_to_stop(self) -> None:
        self.ended.set()

    def wait(self, timeout_s: float) -> None:
        self.ended.wait(timeout_s)

    def remove(self) -> None:
        """Every container, killed."""
        self.ended.set()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server.path.unlink(missing_ok=True)
        for worker in self.workers:
            worker.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def why(self) -> str | None:
        return self.broken

    def ask(self, port: int, path: str) -> str:
        raise OSError("the sandbox serves no HTTP")

    def dump_stacks(self, folder: Path) -> None:
        """There are none to take: a job has a time limit, and ends."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    path: Path
    sandbox: SandboxProcess

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A rank that went away. What the sandbox itself meets is in `broken`, which the supervisor looks at."""


class _Handler(socketserver.StreamRequestHandler):
    """One JSON list of jobs a line in, one list of verdicts a line out."""

    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(json.dumps(self.server.sandbox.judge(json.loads(line))).encode() + b"\n")


def _listen(run_dir: Path, sandbox: SandboxProcess) -> _Server:
    """At the socket, which only this user may connect to."""
    path = run_dir / SOCKET
    path.unlink(missing_ok=True)
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        server = _Server(f"/proc/self/fd/{folder}/{SOCKET}", _Handler)  # a socket's path has at most 107 bytes
    finally:
        os.close(folder)
    path.chmod(0o600)
    server.path, server.sandbox = path, sandbox
    return server
