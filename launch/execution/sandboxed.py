"""Run the sandbox's containers, and the socket that ranks send jobs through.

If a container exits, its job fails, and a new container replaces it.
"""

import contextlib
import dataclasses
import functools
import json
import os
import queue
import socketserver
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException
from docker.utils.socket import STDOUT, frames_iter

from containers import images
from containers.images import LABEL
from containers.sandbox.server import job_time_s
from launch.core.errors import HostError
from launch.execution import docker_engine
from launch.machine.detect import Host
from launch.plan.container import container_name
from launch.schema.plan import ContainerSpec, Plan, Process

SOCKET = "sandbox.sock"  # recipes/rewards/verify_code.py connects to it
READY_TIMEOUT_S = 60.0
GRACE_S = 10.0  # after a job's time limit, because a busy machine starts and stops processes late
EXITED_DURING_JOB = "the sandbox's container exited during this job"


def image_id(client: docker.DockerClient) -> str:
    """Return the id of the image `sandbox`; pull it if it is missing. Raises HostError."""
    key, reference = "method.rewards.code_tests", images.load()["sandbox"].reference
    with docker_engine.host_errors():
        return str(docker_engine.pull_if_missing(client, key, "sandbox", reference).id)


class Worker:
    """A container that is replaced if it exits. Raises HostError if it cannot be created."""

    def __init__(
        self,
        client: docker.DockerClient,
        spec: ContainerSpec,
        image: str,
        host: Host,
        log: Path,
        time_s: float,
    ) -> None:
        self.create = functools.partial(docker_engine.create, client, spec, image, host)
        self.name, self.log, self.time_s = spec.name, log, time_s
        self.closed = False
        self.start()

    def start(self) -> None:
        self.container = self.create()
        if self.closed:  # close() was called while this container was being created
            self.kill()
            return
        try:
            with docker_engine.host_errors(f"container {self.name}: "):
                streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
                self.stream = self.container.attach_socket(params=streams)
                self.answers = self.lines()
                self.container.start()
            ready = self._answer(READY_TIMEOUT_S)
            if ready is None:
                raise HostError(f"container {self.name} did not start; see {self.log}.")
        except HostError:
            self.kill()
            raise
        self.languages = ready["languages"]

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return a job's verdict. Raises HostError if a lost container cannot be replaced."""
        with contextlib.suppress(OSError):  # the container has exited, so there will be no answer
            self.stream._sock.sendall(json.dumps(job).encode() + b"\n")
        verdict = self._answer(job_time_s(self.time_s, len(job["tests"])) + GRACE_S)
        if verdict is None:
            self.kill()
            if not self.closed:
                self.start()
            return {"passed": 0, "total": len(job["tests"]), "error": EXITED_DURING_JOB}
        return verdict

    def close(self) -> None:
        """Kill the container and do not replace it, even if a job is still running."""
        self.closed = True
        self.kill()

    def kill(self) -> None:
        # On an error, the next launcher removes the container by its label.
        with contextlib.suppress(DockerException, requests.RequestException, HostError):
            self.container.remove(force=True)

    def _answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the container's answer; None if it exited or was killed after `timeout_s`."""
        timer = threading.Timer(timeout_s, self.kill)
        timer.start()
        try:
            line = next(self.answers, None)
            return None if line is None else dict(json.loads(line))
        finally:
            timer.cancel()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the container's stdout, and copy its stderr to the log."""
        rest = b""
        with contextlib.suppress(OSError), self.log.open("ab") as log:
            for kind, data in frames_iter(self.stream, tty=False):
                if kind != STDOUT:
                    log.write(data)
                    log.flush()
                    continue
                *complete, rest = (rest + data).split(b"\n")
                yield from complete


class SandboxProcess:
    """A GroupHandle for all containers. Creating one starts them. Raises HostError."""

    def __init__(
        self, client: docker.DockerClient, plan: Plan, process: Process, host: Host, log: Path
    ) -> None:
        spec, time_s = plan.containers[process.name], plan.config.method.sandbox.time_s
        assert spec.confinement is not None
        self.error: str | None = None
        self.stopped = threading.Event()
        self.workers: list[Worker] = []
        self.server: _Server | None = None
        self.idle: queue.Queue[Worker] = queue.Queue()
        image = image_id(client)
        self.pool = ThreadPoolExecutor(spec.confinement.copies)
        futures = []
        for copy in range(spec.confinement.copies):
            name = f"{process.name}-{copy}"
            labels = {**spec.labels, f"{LABEL}.process": name}
            copy_name = container_name(plan.run_dir, name)
            copy_spec = dataclasses.replace(spec, name=copy_name, labels=labels)
            futures.append(self.pool.submit(Worker, client, copy_spec, image, host, log, time_s))
        try:
            wait(futures)
            # Collect the others before a failed one raises, so that remove() kills them.
            self.workers = [future.result() for future in futures if not future.exception()]
            for future in futures:
                self.idle.put(future.result())
            languages = ", ".join(self.workers[0].languages)
            with log.open("a") as file:
                file.write(f"{len(self.workers)} containers; languages: {languages}\n")
            server = _Server(plan.run_dir, self)
            threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
            self.server = server
        except BaseException:
            self.remove()
            raise

    def verdict(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run the job in the next idle container and return its verdict. Raises HostError."""
        worker = self.idle.get()
        try:
            return worker.run(job)
        except HostError as error:
            self.error = str(error)
            raise
        finally:
            self.idle.put(worker)

    def poll(self) -> int | None:
        if self.error:
            return 1
        return 0 if self.stopped.is_set() else None

    def terminate(self) -> None:
        self.stopped.set()

    def wait(self, timeout_s: float) -> None:
        self.stopped.wait(timeout_s)

    def remove(self) -> None:
        self.stopped.set()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server.path.unlink(missing_ok=True)
        for worker in self.workers:
            worker.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def end_reason(self) -> str | None:
        return self.error

    def query(self, port: int, path: str) -> str:
        return ""  # the supervisor sends no requests, because the sandbox has no port

    def dump_stacks(self, folder: Path) -> None:
        """Do nothing, because every job has a time limit."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A socket in the run directory that only this user can connect to."""

    daemon_threads = True

    def __init__(self, run_dir: Path, sandbox: SandboxProcess) -> None:
        self.path, self.sandbox = run_dir / SOCKET, sandbox
        self.path.unlink(missing_ok=True)
        folder = os.open(run_dir, os.O_RDONLY)
        try:
            # A socket's path is limited to 107 bytes, so open the directory and use a short path.
            super().__init__(f"/proc/self/fd/{folder}/{SOCKET}", _Handler)
        finally:
            os.close(folder)
        self.path.chmod(0o600)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore ranks that disconnect. The sandbox's errors are in SandboxProcess.error."""


class _Handler(socketserver.StreamRequestHandler):
    """Read JSON lists of jobs, one per line, and answer each with a list of verdicts."""

    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            sandbox = self.server.sandbox
            verdicts = list(sandbox.pool.map(sandbox.verdict, json.loads(line)))
            self.wfile.write(json.dumps(verdicts).encode() + b"\n")
