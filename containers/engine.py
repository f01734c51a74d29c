"""Pull images and run containers through the docker engine.

Expected failures raise HostError with a remedy. Others raise docker's exceptions, which build.main
prints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors
import psutil
import requests

from containers import causes
from containers.images import LABEL
from launch.core.errors import HostError

BUILDER = f"{LABEL}.builder"  # label of what a build removes: the host and the process of build.py
PYTHON = "python3"  # the command in every base image
PROXY_PAGE = "https://docs.docker.com/engine/daemon/proxy"
Show = Callable[[str], None]


def address() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def connect() -> docker.DockerClient:
    """Connect to an engine that answers. Raises HostError."""
    try:
        # The timeout is for a response without data, in seconds. Installing torch prints nothing
        # for minutes on a slow disk.
        docker.from_env(timeout=10).ping()
        return docker.from_env(timeout=1800)
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
    with contextlib.suppress(docker.errors.ImageNotFound):
        return client.images.get(without_tag(reference))
    return None


def without_tag(reference: str) -> str:
    """Return name@digest for name:tag@digest, because some engines reject both together."""
    name, at, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}@{digest}" if at else reference


def digests(image: Any) -> set[str]:
    """Return the digests that registries have given this image."""
    return {reference.partition("@")[2] for reference in image.attrs.get("RepoDigests") or []}


def find_or_pull(client: docker.DockerClient, reference: str, show: Show) -> Any:
    """Return the image; pull it if it is missing. Raises HostError."""
    if (image := find(client, reference)) is not None:
        show("already on this machine")
        return image
    try:
        pull(client, without_tag(reference), show)
    except docker.errors.APIError as error:
        reason = str(error.explanation or error)
        remedy = causes.full_disk(reason, causes.DOCKER) or (
            f"The engine's proxy failed. Correct it: {PROXY_PAGE}"
            if causes.PROXY.search(reason)
            else "If its registry requires a login, run docker login. Or use a mirror: "
            "containers/build.py base=<reference>. If this machine needs a proxy, configure it in "
            f"the engine: {PROXY_PAGE}"
        )
        raise HostError(f"The image {reference} cannot be pulled: {reason}\n{remedy}") from error
    return client.images.get(without_tag(reference))


def pull(client: docker.DockerClient, reference: str, show: Show) -> None:
    name, _, digest = reference.partition("@")
    layers: dict[str, tuple[int, int]] = {}
    options = {"tag": digest or None, "stream": True, "decode": True}
    for event in raise_errors(client.api.pull(name if digest else reference, **options)):
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


def labels(image: str = "") -> dict[str, str]:
    """Return the labels of what sweep() removes at the latest."""
    return {f"{LABEL}.image": image, BUILDER: f"{socket.gethostname()}/{os.getpid()}"}


def create(client: docker.DockerClient, image: str, argv: list[str], **options: Any) -> Any:
    # Otherwise `docker inspect` would show the client's proxy with its password.
    options |= {"labels": labels(), "use_config_proxy": False}
    return client.containers.create(image, [], entrypoint=argv, **options)


def start(container: Any, show: Show) -> tuple[int, list[str]]:
    """Start a container, and return its exit code and output."""
    container.start()
    lines, rest = [], b""
    for chunk in container.logs(stream=True, follow=True):
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            lines.append(line.decode(errors="replace").rstrip())
            show(lines[-1])
    lines += [rest.decode(errors="replace")] if rest else []
    return container.wait()["StatusCode"], lines


def run(client: docker.DockerClient, image: str, argv: list[str]) -> tuple[int, list[str]]:
    """Run a program in a container without a network; return its exit code and output."""
    container = create(client, image, argv, network_mode="none")
    try:
        return start(container, lambda line: None)
    finally:
        container.remove(force=True, v=True)


def sweep(client: docker.DockerClient, replaced: str = "") -> None:
    """Remove containers and unnamed images of builds that have ended, and of this process.

    Remove the image `replaced` too if it has lost its name.
    """
    for container in client.containers.list(
        all=True, filters={"label": BUILDER}, ignore_removed=True
    ):
        if has_ended(container.labels[BUILDER]):
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True, v=True)
    for image in client.images.list(filters={"dangling": True, "label": f"{LABEL}.image"}):
        ours = image.id == replaced or has_ended(image.labels.get(BUILDER, ""))
        if ours and not digests(image):  # a digest is a name too
            with contextlib.suppress(docker.errors.APIError):  # a user's container has it
                image.remove()


def has_ended(builder: str) -> bool:
    """Return whether the build with this label is this process, or has ended on this host."""
    host, _, pid = builder.partition("/")
    is_here = host == socket.gethostname()
    return is_here and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid)))
