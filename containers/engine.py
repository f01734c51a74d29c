"""Use the docker engine to build images, and leave nothing behind.

Errors name the remedy. Any other engine error passes as docker's own exception, which build.main
shows.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import docker
import docker.errors
import requests

from containers.images import LABEL
from launch.core.errors import HostError

ROLE = f"{LABEL}.role"  # on every container that a build starts
# On every image of a build, with the build's id, so that the image can be removed again; COMPLETE
# on the one that stays.
BUILD, COMPLETE = f"{LABEL}.build", "complete"
PYTHON = "python3"  # its name in every base
TRIES = 100
NOT_FOUND, CONFLICT = 404, 409
Show = Callable[[str], None]


def connect() -> docker.DockerClient:
    """Connect to an engine that answers. Raises HostError."""
    where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        # Seconds without a byte. Installing torch's thousands of files prints nothing for long, and
        # a disk may be slow.
        docker.from_env(timeout=10).ping()
        client = docker.from_env(timeout=1800)
    except (docker.errors.DockerException, requests.RequestException) as error:
        if "PermissionError" in repr(error) or "Permission denied" in str(error):
            raise HostError(
                f"The docker engine's socket ({where}) is not open to this user. Join its group, "
                "then log in again: "
                "sudo usermod -aG docker $USER"
            ) from error
        raise HostError(
            f"No docker engine answers at {where}. Install or start one (Debian: apt-get install "
            "docker.io; systemctl start docker), "
            f"or set DOCKER_HOST to another. It said: {root(error)}"
        ) from error
    return client


def root(error: BaseException) -> str:
    """Return the innermost cause of an error, in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def caller(client: docker.DockerClient) -> str:
    """Return the uid:gid with which a container writes files that belong to the caller.

    A rootless engine's root is its caller.
    """
    rootless = any(
        "name=rootless" in option for option in client.info().get("SecurityOptions") or []
    )
    return "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"


# ---- Images


def find(client: docker.DockerClient, reference: str) -> Any | None:
    try:
        return client.images.get(reference)
    except docker.errors.ImageNotFound:
        return None


def without_tag(reference: str) -> str:
    """Return name@digest for name:tag@digest.

    With a digest the tag does not count, and some engines accept only one of them.
    """
    name, at, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}@{digest}" if at else reference


def digests(image: Any) -> set[str]:
    """Return the digests under which registries know this image."""
    return {reference.partition("@")[2] for reference in image.attrs.get("RepoDigests") or []}


def have(client: docker.DockerClient, reference: str, show: Show) -> Any:
    """Return the image, pulled if it is missing here. Raises HostError."""
    reference = without_tag(reference)
    image = find(client, reference)
    if image is not None:
        show("present")
        return image
    try:
        pull(client, reference, show)
    except docker.errors.APIError as error:
        raise HostError(
            f"The image {reference} is not here and cannot be pulled: "
            f"{error.explanation or error}\n"
            "Log in if its registry requires it (docker login), or use a mirror "
            "(containers/build.py base=<reference>). "
            "The engine pulls images, so configure a proxy there: "
            "https://docs.docker.com/engine/daemon/proxy"
        ) from error
    return client.images.get(reference)


def pull(client: docker.DockerClient, reference: str, show: Show) -> None:
    name, _, digest = reference.partition("@")
    layers: dict[str, tuple[int, int]] = {}
    stream = client.api.pull(
        name if digest else reference, tag=digest or None, stream=True, decode=True
    )
    for event in failing(stream):
        part = event.get("progressDetail") or {}
        if event.get("status") == "Downloading" and part.get("total"):
            layers[event["id"]] = (part["current"], part["total"])
            done, total = (sum(column) / 1e9 for column in zip(*layers.values(), strict=True))
            show(f"{done:.1f} of {total:.1f} GB in {len(layers)} layers")


def failing(stream: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Raise the failure that the engine reports in a response that began without error."""
    for event in stream:
        if "error" in event:
            raise docker.errors.APIError(event["error"], explanation=event["error"])
        yield event


# ---- Containers


def run(
    client: docker.DockerClient, image: str, argv: list[str], show: Show, **options: Any
) -> tuple[int, list[str]]:
    """Run a program in an image; return its exit code and output. Always removes the container."""
    container = client.api.create_container(
        image,
        entrypoint=argv,
        command=[],
        labels={ROLE: "build"},
        # Otherwise the client writes its proxy, password included, into what `inspect` shows.
        use_config_proxy=False,
        **options,
    )["Id"]
    try:
        client.api.start(container)
        lines = []
        for line in whole_lines(client.api.logs(container, stream=True, follow=True)):
            lines.append(line)
            show(line)
        return client.api.wait(container)["StatusCode"], lines
    finally:
        client.api.remove_container(container, force=True, v=True)


def whole_lines(chunks: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace").rstrip() for line in whole)
    if rest:
        yield rest.decode(errors="replace").rstrip()


# ---- Leaving nothing behind


def remove_build(client: docker.DockerClient, build: str) -> None:
    """Remove the leftovers of one build.

    That is the stage that the Dockerfile discards, or the step of a failure or an interruption.
    """
    of_build = {"label": f"{BUILD}={build}"}
    for _ in range(TRIES):  # an interrupted builder takes a moment to release it
        containers = client.api.containers(all=True, filters=of_build)
        for container in containers:
            with tolerated(NOT_FOUND, CONFLICT):  # the builder removes it, too
                client.api.remove_container(container["Id"], force=True, v=True)
        unnamed = client.api.images(filters={"dangling": True, **of_build})
        for image in unnamed:
            remove_unnamed(client, image["Id"])
        if not containers and not unnamed:
            return
        time.sleep(0.1)


def remove_unnamed(client: docker.DockerClient, image: str) -> None:
    """Remove an image without a name, unless a container still uses it."""
    existing = find(client, image)
    if existing is None or existing.tags or digests(existing):  # a digest is a name, too
        return
    with tolerated(NOT_FOUND, CONFLICT):
        client.api.remove_image(image)


@contextlib.contextmanager
def tolerated(*statuses: int) -> Iterator[None]:
    """Ignore errors of the engine that amount to success."""
    try:
        yield
    except docker.errors.APIError as error:
        if error.status_code not in statuses:
            raise
