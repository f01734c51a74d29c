"""What a run asks of the docker engine before and around its containers; what is missing is said in HostErrors.

Imported only under runtime=docker. Reaching the engine and pulling stand in containers/engine.py, which builds images too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, ContainerError, DockerException, NotFound
from docker.models.containers import Container
from docker.models.images import Image
from rich.console import Console

from containers import engine as images_engine
from containers import images
from containers.images import LABEL, OCI
from launch.errors import HostError
from launch.files import rundir
from launch.machine.detect import Host
from launch.plan import Plan
from launch.runtimes import rocprof
from launch.runtimes.container import ContainerSpec, container_name, image_reference, sdk_arguments
from launch.schema.enums import Profile


def connect() -> docker.DockerClient:
    """Raises HostError."""
    try:
        return images_engine.connect()
    except HostError as error:
        raise HostError(f"{error}\nWithout containers: runtime=local.") from error


def connect_for(what: str) -> docker.DockerClient:
    """For what no runtime does without an engine. Raises HostError."""
    try:
        return images_engine.connect()
    except HostError as error:
        raise HostError(f"{what}. {error}") from error


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Whatever the engine refuses, or a connection to it that breaks, as a HostError."""
    try:
        yield
    except (DockerException, requests.RequestException) as error:
        raise HostError(f"the docker engine refuses: {getattr(error, 'explanation', None) or images_engine.root(error)}") from error


def check(plan: Plan, host: Host) -> dict[str, Any]:
    """Everything that can be known before a container is made. Returns the facts of the image for the record. Raises HostError."""
    client = connect()
    with told():
        remove_orphans(client, host)
        check_devices(plan, host)
        facts = image_facts(pull_if_absent(client, plan))
    check_image(plan, facts)
    if plan.config.profile == Profile.rocprof:
        check_profiler(client, plan, facts["id"])
    return facts


def check_devices(plan: Plan, host: Host) -> None:
    wanted = sorted({node for spec in plan.containers.values() for node in spec.devices})
    missing = [node for node in wanted if node not in host.device_nodes]
    if "/dev/kfd" in missing:
        raise HostError("/dev/kfd is missing: the amdgpu driver with KFD is not loaded here (sudo modprobe amdgpu; lsmod | grep amdgpu).")
    if missing:
        raise HostError(
            f"{', '.join(missing)} missing: the plan gives these devices to containers. Here: {', '.join(host.device_nodes) or 'none'}."
        )
    closed = {node: gid for node in wanted if (gid := host.device_nodes[node]) is not None and gid not in host.member_of}
    if closed and host.uid != 0:
        names = {number: name for name, number in host.gids.items()}
        outside = ",".join(sorted({names.get(gid, str(gid)) for gid in closed.values()}))
        first = next(iter(closed))
        raise HostError(
            f"you are not in {outside}, and only its members open {first}: sudo usermod -aG {outside} $USER, then log in again."
        )


def pull_if_absent(client: docker.DockerClient, plan: Plan) -> Image:
    """The image of a plan. One that nobody has pushed is built, not pulled. Raises HostError."""
    name, reference = plan.config.container.name, image_reference(plan.config)
    found = images_engine.find(client, reference)
    if found is not None:
        return found
    custom = name == "custom"
    if not custom and reference == images.load()[name].local_reference:
        raise HostError(
            f"container={name}: {reference} is not built on this machine, and nobody has pushed it as it is now. "
            f"python containers/build.py image={name}"
        )
    with Console(stderr=True).status(f"pulling {reference}") as status:
        size_gb = images.UNKNOWN if custom else images.load()[name].size_gb
        try:
            return images_engine.have(client, reference, size_gb, lambda line: status.update(f"pulling {reference}: {line}"))
        except HostError as error:
            here = "" if custom else f"\nOr build it here: python containers/build.py image={name}"
            raise HostError(f"container={name}: {error}{here}") from error


def image_facts(image: Image) -> dict[str, Any]:
    """What the record keeps of an image: what it is, not what it is called."""
    labels = image.labels or {}
    ours = {key.removeprefix(f"{LABEL}."): value for key, value in labels.items() if key.startswith(f"{LABEL}.")}
    base = {key: labels.get(f"{OCI}.base.{key}") for key in ("name", "digest")}
    return {"id": image.id, "repo_digests": sorted(image.attrs.get("RepoDigests") or []), "base": base, "labels": ours}


def check_image(plan: Plan, facts: dict[str, Any]) -> None:
    """The image is what the lock says and serves this GPU. Raises HostError."""
    config = plan.config
    if config.container.name == "custom":
        return
    image, labels = images.load()[config.container.name], facts["labels"]
    rebuild = f"python containers/build.py image={image.name}"
    digests = [reference.partition("@")[2] for reference in facts["repo_digests"]]
    if image.reference != image.local_reference and image.reference.partition("@")[2] not in digests:
        raise HostError(
            f"container={image.name}: the image here has the digests {facts['repo_digests']}, the lock {image.reference}. {rebuild}"
        )
    if labels.get("image") != image.name or labels.get("tag") != image.tag:
        raise HostError(
            f"container={image.name}: {image.reference} was built from other inputs ({labels.get('image')}:{labels.get('tag')}) "
            f"than this repository holds ({image.tag}). {rebuild}"
        )
    base = facts["base"]
    if image.verified and base["digest"] != image.digest:
        raise HostError(f"container={image.name}: built on {base['name']} ({base['digest']}), and the lock names {image.digest}. {rebuild}")
    gfx = config.hardware.gfx
    if gfx.startswith("gfx") and not config.smoke and gfx not in labels.get("gfx", "").split(","):
        raise HostError(f"container={image.name}: the image has no code for {gfx}, only for {labels.get('gfx')}. {rebuild}")


def check_profiler(client: docker.DockerClient, plan: Plan, image_id: str) -> None:
    """The image holds the program of profile=rocprof: a container that looks for it and goes. Raises HostError."""
    look = ["-c", 'command -v "$0"', plan.config.rocprof.value]
    with told():
        try:
            client.containers.run(image_id, look, entrypoint="/bin/sh", network_mode="none", remove=True)
        except ContainerError as error:
            raise rocprof.absent(plan.config, f"in container={plan.config.container.name}", "in an image of your own") from error


def remove_orphans(client: docker.DockerClient, host: Host) -> list[str]:
    """Stop and remove containers of launchers that are gone. Ours only: by labels, the caller's uid, and the name that follows.

    A launcher holds its run directory's lock for as long as it lives, however it dies. A container that the engine cannot remove
    (a GPU process in an uninterruptible sleep) is named, and keeps nobody from starting another run.
    """
    removed = []
    for container in client.containers.list(all=True, filters={"label": [f"{LABEL}.run", f"{LABEL}.uid={host.uid}"]}, ignore_removed=True):
        if not is_ours(container, host) or rundir.is_locked(Path(container.labels[f"{LABEL}.run"])):
            continue
        print(f"{container.name}: its launcher is gone; it is stopped and removed", file=sys.stderr)
        try:
            remove(container)
            removed.append(container.name)
        except (APIError, requests.RequestException) as error:
            print(f"{container.name} cannot be removed: {getattr(error, 'explanation', None) or error}", file=sys.stderr)
    return removed


def is_ours(container: Container, host: Host) -> bool:
    """Labels alone are not proof: an image made of a container inherits them."""
    labels = container.labels
    run, process = labels.get(f"{LABEL}.run", ""), labels.get(f"{LABEL}.process", "")
    return bool(run) and labels.get(f"{LABEL}.uid") == str(host.uid) and container.name == container_name(Path(run), process)


def remove(container: Container) -> None:
    """Gone, whatever state it was in; one that runs is asked first, and has its own stop timeout to save."""
    try:
        if container.status == "running":
            container.stop()
        container.remove(force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:  # somebody removes it already
            raise
        _wait_until_gone(container)


def _wait_until_gone(container: Container) -> None:
    for _ in range(100):
        try:
            container.reload()
        except NotFound:
            return
        time.sleep(0.1)
    raise HostError(f"the engine does not finish removing the container {container.name}; `docker ps -a` shows it.")


def create(client: docker.DockerClient, spec: ContainerSpec, image_id: str, host: Host) -> Container:
    """Made from the very image that was checked, not started. Raises HostError."""
    with told():
        # One of the same name is a dead launcher's: this run's lock is held.
        with contextlib.suppress(NotFound):
            old = client.containers.get(spec.name)
            if not is_ours(old, host):
                raise HostError(f"a container named {spec.name} is there, and it is not ours. docker rm {spec.name} makes room.")
            remove(old)
        arguments = sdk_arguments(spec)
        host_config = client.api.create_host_config(**sdk_objects(arguments["host"]))
        # A rootless engine's root is its caller. The sandbox writes nothing that anybody owns.
        own = {"image": image_id, "user": spec.user if spec.confinement else images_engine.caller(client)}
        made = client.api.create_container(**{**arguments["container"], **own}, host_config=host_config)
        return client.containers.get(made["Id"])


def sdk_objects(arguments: dict[str, Any]) -> dict[str, Any]:
    """Plain data as the SDK's own classes."""
    log = arguments["log_config"]
    objects: dict[str, Any] = {
        "ulimits": [docker.types.Ulimit(name=u["Name"], soft=u["Soft"], hard=u["Hard"]) for u in arguments["ulimits"]],
        "mounts": [docker.types.Mount(m["Target"], m["Source"], type="bind", read_only=m["ReadOnly"]) for m in arguments["mounts"]],
        "log_config": docker.types.LogConfig(type=log["Type"], config=log["Config"]),
    }
    if "device_requests" in arguments:
        objects["device_requests"] = [docker.types.DeviceRequest(**request) for request in arguments["device_requests"]]
    return {**arguments, **objects}
