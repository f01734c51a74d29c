"""What a run asks of the docker engine before and around its containers; what is missing is said in HostErrors.

Imported only under runtime=docker. Reaching the engine and pulling stand in containers/engine.py, which builds images too.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.models.images import Image
from rich.console import Console

from containers import engine as images_engine
from containers import images
from launch import rundir
from launch.container import LABEL, ContainerSpec, sdk_arguments
from launch.detect import Host
from launch.errors import HostError
from launch.plan import Plan
from launch.trainer_args import SERVER_PORT


def connect() -> docker.DockerClient:
    """Raises HostError."""
    try:
        return images_engine.connect()
    except HostError as error:
        raise HostError(f"{error}\nWithout containers: runtime=local.") from error


def check(plan: Plan, host: Host) -> dict[str, Any]:
    """Everything that can be known before a container is made. Returns the facts of the image for the record. Raises HostError."""
    client = connect()
    remove_orphans(client, host)
    check_devices(plan, host)
    check_ports(plan)
    found = pull_if_absent(client, plan)
    facts = image_facts(found)
    check_image(plan, facts)
    return facts


def check_devices(plan: Plan, host: Host) -> None:
    wanted = sorted({node for spec in plan.containers.values() for node in spec.devices})
    missing = [node for node in wanted if node not in host.device_nodes]
    if "/dev/kfd" in missing:
        raise HostError("/dev/kfd is missing: the amdgpu driver with KFD is not loaded here (sudo modprobe amdgpu; lsmod | grep amdgpu).")
    if missing:
        there = [node for node in host.device_nodes if "renderD" in node]
        raise HostError(f"{', '.join(missing)} missing: the plan gives these devices to containers. Here: {', '.join(there) or 'none'}.")
    if not wanted or host.uid == 0:
        return
    if not host.gids:
        raise HostError("no group video or render on this host; the amdgpu installer makes both, and /dev/kfd belongs to one.")
    outside = [name for name, gid in host.gids.items() if gid not in host.member_of]
    if outside:
        raise HostError(
            f"you are not in {' and '.join(outside)}, which the GPUs' device nodes belong to: "
            f"sudo usermod -aG {','.join(outside)} $USER, then log in again."
        )


def check_ports(plan: Plan) -> None:
    """A generation server on the host's own network needs its port. In a network of its own it is always free."""
    servers = [p for p in plan.processes if p.kind == "server"]
    for index, process in enumerate(servers):
        spec = plan.containers.get(process.name)
        if spec and spec.network != "host":
            continue
        port = SERVER_PORT + index
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise HostError(
                    f"port {port} is taken, and {process.name} listens there. `ss -ltnp sport = :{port}` names who does; "
                    "under runtime=docker, runtime.network=bridge gives the server a network of its own."
                ) from error


def pull_if_absent(client: docker.DockerClient, plan: Plan) -> Image:
    """The image of a plan. One that nobody has pushed is built, not pulled. Raises HostError."""
    name, reference = plan.config.container.name, next(iter(plan.containers.values())).image
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
    base = {key: labels.get(f"org.opencontainers.image.base.{key}") for key in ("name", "digest")}
    return {"id": image.id, "repo_digests": sorted(image.attrs.get("RepoDigests") or []), "base": base, "labels": ours}


def check_image(plan: Plan, facts: dict[str, Any]) -> None:
    """The image is what the lock says and serves this GPU. Raises HostError."""
    config = plan.config
    if config.container.name == "custom":
        return
    image, labels = images.load()[config.container.name], facts["labels"]
    rebuild = f"python containers/build.py image={image.name}"
    if image.reference != image.local_reference and image.reference not in facts["repo_digests"]:
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


def remove_orphans(client: docker.DockerClient, host: Host) -> list[str]:
    """Stop and remove containers of launchers that are gone, and their secrets. Ours only: by label, and by the caller's uid.

    A launcher holds its run directory's lock for as long as it lives, however it dies.
    """
    removed = []
    for container in client.containers.list(all=True, filters={"label": [f"{LABEL}.run", f"{LABEL}.uid={host.uid}"]}, ignore_removed=True):
        if rundir.is_locked(Path(container.labels[f"{LABEL}.run"])):
            continue
        remove(container)
        removed.append(container.name)
    return removed


def remove(container: Container, grace_s: int = 10) -> None:
    """Gone, whatever state it was in; one that runs is asked first."""
    try:
        if container.status == "running":
            container.stop(timeout=grace_s)
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


def create(client: docker.DockerClient, spec: ContainerSpec) -> Container:
    """Made, not started. One of the same name is a dead launcher's: this run's lock is held. Raises HostError."""
    with contextlib.suppress(NotFound):  # there is none: the usual case
        remove(client.containers.get(spec.name))
    try:
        # A rootless engine's root is its caller. The client would copy its proxies, passwords and all, into what `inspect` shows.
        arguments = {**sdk_arguments(spec), "user": images_engine.caller(client), "use_config_proxy": False}
        return client.containers.create(**sdk_objects(arguments))
    except APIError as error:
        raise HostError(f"the engine refuses the container {spec.name}: {error.explanation or error}") from error


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
