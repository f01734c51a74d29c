"""Pull images and run containers through the docker engine, and show its progress.

Expected failures raise HostError with a remedy, and others docker's exceptions.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
import psutil
from docker.utils import create_archive
from docker.utils.json_stream import split_buffer

from containers.images import LABEL, REPOSITORY
from launch.core import docker_host
from launch.core.errors import HostError

BUILDER = f"{LABEL}.builder"  # label of what a build removes: its host and process
HOST = socket.gethostname()
THIS_BUILD = f"{HOST}/{os.getpid()}"  # value of the label BUILDER
INSTALLED = f"{REPOSITORY}/installed"  # name of the images that a build removes
PULL_REMEDY = (
    "Check the engine's login (docker login), disk (docker image prune) and proxy ("
    "https://docs.docker.com/engine/daemon/proxy), or use base=<a mirror> of containers/build.py"
)
QUIET_S = 10.0  # longest silence
Show = Callable[[str], None]


def connect() -> docker.DockerClient:
    """Connect to an engine that answers. Raises HostError."""
    address = docker_host.address(os.environ)
    if problem := docker_host.problem(address, is_build=True):
        raise HostError(problem)
    try:
        # The timeout is for a response without data, in seconds. Installing torch prints nothing
        # for minutes on a slow disk.
        docker.from_env(timeout=10).ping()
        return docker.from_env(timeout=1800)
    except (docker.errors.DockerException, OSError) as error:
        remedy = "Start one (Debian: apt-get install docker.io). For podman: docs/containers.md."
        if "Permission denied" in explain(error):
            remedy = "Join its group (sudo usermod -aG docker $USER), then log in again."
        problem = f"No docker engine answers at {address} ({explain(error)})."
        raise HostError(f"{problem} {remedy}") from error


def explain(error: BaseException) -> str:
    """Return the engine's message, or the first line of an error's innermost cause."""
    if explanation := getattr(error, "explanation", None):
        return str(explanation)
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def find(client: docker.DockerClient, reference: str) -> Any | None:
    with contextlib.suppress(docker.errors.ImageNotFound):
        return client.images.get(without_tag(reference))
    return None


def without_tag(reference: str) -> str:
    """Return name@digest for name:tag@digest, because some engines reject both together."""
    return re.sub(r":[^:/@]+@", "@", reference)


def digests(image: Any) -> set[str]:
    """Return the digests that registries have given this image."""
    return {reference.partition("@")[2] for reference in image.attrs.get("RepoDigests") or []}


def pull(client: docker.DockerClient, reference: str, show: Show) -> Any:
    """Pull an image, and return it. Raises HostError."""
    try:
        follow(client.api.pull(without_tag(reference), stream=True, decode=True), show)
    except docker.errors.APIError as error:
        problem = f"The image {reference} cannot be pulled: {explain(error)}"
        raise HostError(f"{problem}\n{PULL_REMEDY}") from error
    return client.images.get(without_tag(reference))


def follow(events: Iterable[dict[str, Any]], show: Show) -> str:
    """Show the events of a pull or a push; return the digest in them. Raises APIError."""
    digest, layers = "", defaultdict[str, dict[str, tuple[int, int]]](dict)
    for event in events:
        if "error" in event:
            raise docker.errors.APIError(event["error"], explanation=event["error"])
        digest = (event.get("aux") or {}).get("Digest", digest)
        status, part = event.get("status", ""), event.get("progressDetail") or {}
        if part.get("total"):  # of the layers that have begun
            layers[status][event["id"]] = part["current"], part["total"]
            sums = (sum(column) / 1e9 for column in zip(*layers[status].values(), strict=True))
            show("{} {:.1f} of {:.1f} GB".format(status, *sums))
        elif status and not layers:
            show(status)
    return digest


@contextlib.contextmanager
def ran(
    client: docker.DockerClient,
    image: str,
    argv: list[str],
    files: Mapping[str, str] = {},
    show: Show = lambda line: None,
    **options: Any,
) -> Iterator[tuple[int, list[str], Any]]:
    """Run a program with more files; yield its exit code, its output and the ended container.

    The container has no network, unless `options` give it one.
    """
    # Otherwise `docker inspect` would show the client's proxy with its password.
    options = {"network_mode": "none", "use_config_proxy": False, "entrypoint": argv, **options}
    options["labels"] = {BUILDER: THIS_BUILD}
    # An interruption waits for the thread. sweep() cannot remove what the engine still creates.
    with ThreadPoolExecutor(1) as pool:
        container = pool.submit(client.containers.create, image, [], **options).result()
    try:
        if files:
            container.put_archive("/", create_archive("/", [], extra_files=[*files.items()]))
        container.start()
        lines = []
        for line in split_buffer(container.logs(stream=True, follow=True)):
            lines.append(line.rstrip())
            show(lines[-1])
        yield container.wait()["StatusCode"], lines, container
    finally:
        container.remove(force=True, v=True)


def sweep(client: docker.DockerClient) -> None:
    """Remove what builds that have ended left on this host, and what this process left."""

    def is_left(row: dict[str, Any]) -> bool:
        builder: str = row["Labels"][BUILDER]
        host, _, pid = builder.partition("/")
        return builder == THIS_BUILD or (host == HOST and not psutil.pid_exists(int(pid)))

    for row in filter(is_left, client.api.containers(all=True, filters={"label": BUILDER})):
        with contextlib.suppress(docker.errors.NotFound):
            client.api.remove_container(row["Id"], force=True, v=True)
    for kind in ({"reference": INSTALLED}, {"dangling": True}):
        for row in filter(is_left, client.api.images(filters={"label": BUILDER, **kind})):
            with contextlib.suppress(docker.errors.APIError):  # a user's container or name has it
                client.api.remove_image(row["Id"])


@contextlib.contextmanager
def heartbeat() -> Iterator[Show]:
    """Yield a function that is told the current activity; print the activity every QUIET_S."""
    activities, ended = deque(["starting"], maxlen=1), threading.Event()
    started_s = time.monotonic()

    def repeat() -> None:
        while not ended.wait(QUIET_S):
            took_s = time.monotonic() - started_s
            print(f"... {took_s:.0f} s: {activities[-1].strip()[:80]}", flush=True)

    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield activities.append
    finally:
        ended.set()
