"""Pull images and run containers through the docker engine.

Expected failures raise HostError with a remedy. Others raise docker's exceptions, which build.main
prints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors
import requests

from containers import causes
from containers.images import LABEL
from launch.core.errors import HostError

ROLE = f"{LABEL}.role"  # label of every container that a build starts
FREE = "Free space on it, for example: docker image prune"
PYTHON = "python3"  # the command in every base image
NOT_FOUND, CONFLICT = 404, 409
Show = Callable[[str], None]


def address() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def connect() -> docker.DockerClient:
    """Connect to an engine that answers. Raises HostError."""
    try:
        # The timeout is for a response without data, in seconds. Installing torch prints nothing
        # for minutes on a slow disk.
        docker.from_env(timeout=10).ping()
        client = docker.from_env(timeout=1800)
    except (docker.errors.DockerException, requests.RequestException) as error:
        if "PermissionError" in repr(error) or "Permission denied" in str(error):
            raise HostError(
                f"This user has no access to the docker engine's socket ({address()}). Join its "
                "group (sudo usermod -aG docker $USER), then log in again."
            ) from error
        raise HostError(
            f"No docker engine answers at {address()} ({root_cause(error)}). Install or start one "
            "(Debian: apt-get install docker.io; systemctl start docker), or set DOCKER_HOST "
            "(podman: systemctl --user start podman.socket; "
            "DOCKER_HOST=unix://$XDG_RUNTIME_DIR/podman/podman.sock)."
        ) from error
    return client


def root_cause(error: BaseException) -> str:
    """Return the first line of an error's innermost cause."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def caller(client: docker.DockerClient) -> str:
    """Return the uid:gid whose files in a container belong to this user on the host.

    In a rootless engine's containers, that is root.
    """
    return "0:0" if kind(client).rootless else f"{os.getuid()}:{os.getgid()}"


@dataclass(frozen=True)
class Kind:
    """The properties of an engine that its containers' settings depend on."""

    podman: bool
    rootless: bool
    limits: bool  # whether it can limit memory and processes


@functools.cache  # podman takes half a second to answer
def kind(client: docker.DockerClient) -> Kind:
    info = client.info()
    # podman before 4.6 has only the key Rootless.
    options = info.get("SecurityOptions") or []
    rootless = info.get("Rootless") or any("name=rootless" in option for option in options)
    # podman claims limits with cgroups v1, which no rootless engine can set.
    limits = all(info.get(key, True) for key in ("MemoryLimit", "PidsLimit"))
    limits = limits and not (rootless and info.get("CgroupVersion") == "1")
    return Kind("BuildahVersion" in info, bool(rootless), limits)


# ---- Images


def find(client: docker.DockerClient, reference: str) -> Any | None:
    try:
        return client.images.get(reference)
    except docker.errors.ImageNotFound:
        return None


def without_tag(reference: str) -> str:
    """Return name@digest for name:tag@digest.

    Some engines reject a reference that has both a tag and a digest.
    """
    name, at, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}@{digest}" if at else reference


def digests(image: Any) -> set[str]:
    """Return the digests that registries have given this image."""
    return {reference.partition("@")[2] for reference in image.attrs.get("RepoDigests") or []}


def find_or_pull(client: docker.DockerClient, reference: str, show: Show) -> Any:
    """Return the image; pull it if it is missing. Raises HostError."""
    reference = without_tag(reference)
    image = find(client, reference)
    if image is not None:
        show("already on this machine")
        return image
    try:
        pull(client, reference, show)
    except docker.errors.APIError as error:
        reason = str(error.explanation or error)
        proxy = "https://docs.docker.com/engine/daemon/proxy"
        remedy = (
            "If its registry requires a login, run docker login. Or use a mirror: "
            "containers/build.py base=<reference>. If this machine needs a proxy, configure it in "
            f"the engine: {proxy}"
        )
        if causes.PROXY.search(reason):
            remedy = f"The engine's proxy failed. Correct it: {proxy}"
        remedy = causes.full_disk(reason, "Docker's disk", FREE) or remedy
        raise HostError(f"The image {reference} cannot be pulled: {reason}\n{remedy}") from error
    return client.images.get(reference)


def pull(client: docker.DockerClient, reference: str, show: Show) -> None:
    name, _, digest = reference.partition("@")
    layers: dict[str, tuple[int, int]] = {}
    stream = client.api.pull(
        name if digest else reference, tag=digest or None, stream=True, decode=True
    )
    for event in raise_errors(stream):
        part = event.get("progressDetail") or {}
        if event.get("status") == "Downloading" and part.get("total"):
            layers[event["id"]] = (part["current"], part["total"])
            done, total = (sum(column) / 1e9 for column in zip(*layers.values(), strict=True))
            show(f"{done:.1f} of {total:.1f} GB in {len(layers)} layers")


def raise_errors(stream: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a response; raise APIError for an error among them."""
    for event in stream:
        if "error" in event:
            raise docker.errors.APIError(event["error"], explanation=event["error"])
        yield event


# ---- Containers


@contextlib.contextmanager
def container(
    client: docker.DockerClient, image: str, argv: list[str], **options: Any
) -> Iterator[str]:
    """Yield the id of a new container, and remove it."""
    new = name = f"rocm-recipes-{uuid.uuid4().hex[:12]}"
    try:
        new = client.api.create_container(
            image,
            entrypoint=argv,
            command=[],
            name=name,
            labels={ROLE: "build"},
            # Otherwise `docker inspect` would show the client's proxy with its password.
            use_config_proxy=False,
            **options,
        )["Id"]
        yield new
    except KeyboardInterrupt:
        time.sleep(1)  # the engine may still be creating it
        raise
    finally:
        with contextlib.suppress(docker.errors.NotFound):
            client.api.remove_container(new, force=True, v=True)


def start(client: docker.DockerClient, container: str, show: Show) -> tuple[int, list[str]]:
    """Start a container, and return its exit code and output."""
    client.api.start(container)
    lines = []
    for line in split_lines(client.api.logs(container, stream=True, follow=True)):
        lines.append(line)
        show(line)
    return client.api.wait(container)["StatusCode"], lines


def run(
    client: docker.DockerClient, image: str, argv: list[str], show: Show, **options: Any
) -> tuple[int, list[str]]:
    """Run a program in a new container, remove it, and return the exit code and output."""
    with container(client, image, argv, **options) as new:
        return start(client, new, show)


def split_lines(chunks: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace").rstrip() for line in lines)
    if rest:
        yield rest.decode(errors="replace").rstrip()


def remove_unnamed(client: docker.DockerClient, image: str) -> None:
    """Remove an image unless it has a name or a container uses it."""
    existing = find(client, image)
    if existing is None or existing.tags or digests(existing):  # a digest is a name too
        return
    try:
        client.api.remove_image(image)
    except docker.errors.APIError as error:
        if error.status_code not in (NOT_FOUND, CONFLICT):
            raise
