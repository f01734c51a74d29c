"""Pull images and run containers through the docker engine.

Expected failures raise HostError with a remedy. Others raise docker's exceptions, which build.main
prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import docker
import docker.errors
import psutil
import requests

from containers import causes
from containers.images import LABEL, Image
from launch.core import docker_host
from launch.core.errors import HostError

BUILDER = f"{LABEL}.builder"  # label of what a build removes: its host and process
PROXY_PAGE = "https://docs.docker.com/engine/daemon/proxy"
Show = Callable[[str], None]


def address() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def connect() -> docker.DockerClient:
    """Connect to an engine that answers. Raises HostError."""
    if problem := docker_host.problem(address(), is_build=True):
        raise HostError(problem)
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


def check_space(client: docker.DockerClient, image: Image) -> None:
    """Raise HostError if the disk of an engine on this machine is too small for the image."""
    folder = str(client.info().get("DockerRootDir"))
    if not client.api.base_url.startswith("http+docker") or not os.path.isdir(folder):
        return  # another machine's disk
    if problem := image.space_problem(folder, shutil.disk_usage(folder).free / 1e9):
        raise HostError(problem)


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


@contextlib.contextmanager
def ran(
    client: docker.DockerClient,
    image: str,
    argv: list[str],
    files: Mapping[str, bytes] = {},
    show: Show = lambda line: None,
    **options: Any,
) -> Iterator[tuple[int, list[str], Any]]:
    """Run a program with more files; yield its exit code, its output and the ended container.

    Without `options`, the container has no network.
    """
    options = options or {"network_mode": "none"}
    # Otherwise `docker inspect` would show the client's proxy with its password.
    options |= {"labels": {BUILDER: builder()}, "use_config_proxy": False}
    container = client.containers.create(image, [], entrypoint=argv, **options)
    try:
        if files:
            container.put_archive("/", tar(files))
        try:
            container.start()
        except docker.errors.APIError as error:
            raise HostError(f"{image} cannot run {argv[0]}: {error.explanation}") from error
        lines, rest = [], b""
        for chunk in container.logs(stream=True, follow=True):
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                lines.append(line.decode(errors="replace").rstrip())
                show(lines[-1])
        lines += [rest.decode(errors="replace")] if rest else []
        yield container.wait()["StatusCode"], lines, container
    finally:
        container.remove(force=True, v=True)


def tar(files: Mapping[str, bytes]) -> io.BytesIO:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    archive.seek(0)
    return archive


def builder() -> str:
    return f"{socket.gethostname()}/{os.getpid()}"


def sweep(client: docker.DockerClient) -> None:
    """Remove what builds that have ended left on this host, and what this process left."""

    def is_left(thing: Any) -> bool:
        host, _, pid = thing.labels[BUILDER].partition("/")
        is_ours = host == socket.gethostname()
        return is_ours and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid)))

    every = {"all": True, "ignore_removed": True}
    for container in filter(is_left, client.containers.list(filters={"label": BUILDER}, **every)):
        with contextlib.suppress(docker.errors.NotFound):
            container.remove(force=True, v=True)
    unnamed = client.images.list(filters={"dangling": True, "label": BUILDER})
    for image in filter(is_left, unnamed):
        with contextlib.suppress(docker.errors.APIError):  # a user's container has it
            image.remove()
