"""Check images, and create and remove the containers of runs. Raises HostError.

containers/engine.py connects to the engine and pulls images.
"""

import contextlib
import functools
import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container
from docker.models.images import Image
from rich.console import Console

from containers import engine as images_engine
from containers import images
from containers.images import LABEL, OCI
from launch.core import docker_host
from launch.core.errors import HostError
from launch.execution.mounted import make_mounted
from launch.machine.container_engine import KEEP_GROUPS
from launch.machine.detect import Host
from launch.machine.sysfs import text
from launch.plan import rundir, tools
from launch.plan.container import (
    LIMITS,
    PAUSE,
    container_name,
    image_reference,
    sdk_arguments,
)
from launch.schema.plan import ContainerSpec, Plan

STATUS = Path("/proc/self/status")
CAP_SYS_RESOURCE = 24  # linux/capability.h
WITHOUT = "Without containers: runtime=local."


def connect(hint: str = WITHOUT) -> docker.DockerClient:
    """Connect to the engine. On failure, append `hint` to the error."""
    with host_errors(hint=f"\n{hint}"):
        return images_engine.connect()


def explain(error: Exception) -> str:
    """Return the engine's message, with a remedy for podman."""
    message = images_engine.explain(error)
    if "container-init binary not found" in message:  # of podman, which only recommends it
        message += ". Install it (Debian, Fedora: the package catatonit)."
    return message


@contextlib.contextmanager
def host_errors(prefix: str = "", hint: str = "") -> Iterator[None]:
    """Raise the engine's errors as HostError, with `prefix` before and `hint` after each."""
    try:
        yield
    except (DockerException, requests.RequestException, HostError) as error:
        if isinstance(error, HostError):
            message = str(error)
        else:
            prefix, message = prefix or "docker engine: ", explain(error)
        raise HostError(f"{prefix}{message}{hint}") from error


def check(plan: Plan, host: Host) -> dict[str, Any]:
    """Remove orphaned containers, pull the image if it is missing, and check it.

    Return the image's facts for the record.
    """
    if problem := docker_host.problem(docker_host.address(os.environ)):
        raise HostError(problem)
    client, name = connect(without_engine(plan, host)), plan.config.container.name
    check_limits(client, plan)
    with host_errors():
        remove_orphans(client, host)
        image = pull_if_missing(client, f"container={name}", name, image_reference(plan.config))
        facts = image_facts(image.id, image.attrs.get("RepoDigests") or [], image.labels or {})
    check_image(plan, facts)
    check_tools(client, plan, facts["id"])
    return facts


def without_engine(plan: Plan, host: Host) -> str:
    """Return what to do in place of starting an engine."""
    kfd = "/dev/kfd"
    is_needed = any(kfd in spec.devices for spec in plan.containers.values())
    if is_needed and kfd not in host.device_nodes:
        return f"Even with one, {kfd} would be missing. For the reason: python launch/doctor.py."
    return WITHOUT


@dataclass(frozen=True)
class Kind:
    """The properties of an engine that its containers' settings depend on."""

    podman: bool
    rootless: bool
    limits: bool  # whether it can limit memory and processes


@functools.cache  # podman takes half a second to answer
def kind_of(client: docker.DockerClient) -> Kind:
    info = client.info()
    # podman before 4.6 has only the key Rootless.
    options = info.get("SecurityOptions") or []
    rootless = info.get("Rootless") or any("name=rootless" in option for option in options)
    # podman claims limits with cgroups v1, which no rootless engine can set.
    limits = all(info.get(key, True) for key in ("MemoryLimit", "PidsLimit"))
    limits = limits and not (rootless and info.get("CgroupVersion") == "1")
    return Kind("BuildahVersion" in info, bool(rootless), limits)


def check_limits(client: docker.DockerClient, plan: Plan) -> None:
    """Raise HostError if the engine would silently ignore the limits of a container."""
    with host_errors():
        kind = kind_of(client)
    needed = {
        "method.rewards.code_tests" if spec.confinement else "runtime.memory_gb"
        for spec in plan.containers.values()
        if spec.confinement or spec.memory_gb
    }
    if needed and not kind.limits:
        raise HostError(
            f"{' and '.join(sorted(needed))}: this engine cannot limit memory and processes. A "
            "rootless engine needs cgroups v2 and their delegation: boot with "
            "systemd.unified_cgroup_hierarchy=1. Or use an engine that runs as root."
        )


def check_tools(client: docker.DockerClient, plan: Plan, image_id: str) -> None:
    """Raise HostError if the image lacks a program that the plan needs."""

    def run(argv: list[str]) -> str:
        with host_errors(), images_engine.ran(client, image_id, argv) as (code, lines, _):
            pass
        if code or not lines:
            raise HostError(f"container={plan.config.container.name}: python3 failed: {lines[-1:]}")
        return lines[-1]

    tools.check(plan.config, run)


def pull_if_missing(client: docker.DockerClient, key: str, name: str, reference: str) -> Image:
    """Return an image; pull it from a registry if it is not on this machine.

    `key` is the setting that needs the image. Raises HostError.
    """
    if (present := images_engine.find(client, reference)) is not None:
        return present
    image = None if name == "custom" else images.load()[name]
    build = f"python containers/build.py image={name}" if image else ""
    if image and reference == image.local_reference:
        raise HostError(
            f"{key}: {reference} is not on this machine, and no registry has it. Build it: {build}"
        )
    with (
        Console(stderr=True).status(f"pulling {reference}") as status,
        host_errors(f"{key}: ", f"\nOr build it here: {build}" if build else ""),
    ):
        return images_engine.pull(
            client,
            reference,
            lambda line: status.update(f"pulling {reference}: {line}"),
        )


def image_facts(id: str, repo_digests: list[str], labels: dict[str, str]) -> dict[str, Any]:
    """Return the facts that the record keeps about an image's contents."""
    ours = {
        key.removeprefix(f"{LABEL}."): value
        for key, value in labels.items()
        if key.startswith(f"{LABEL}.") and key != images_engine.BUILDER
    }
    versions = json.loads(ours.pop("probe", "{}"))
    return {
        "id": id,
        "repo_digests": sorted(repo_digests),
        "base": {key: labels.get(f"{OCI}.base.{key}") for key in ("name", "digest")},
        "labels": versions | ours,  # both have gfx; check_image reads the label
    }


def check_image(plan: Plan, facts: dict[str, Any]) -> None:
    """Raise HostError if the image is out of date or has no code for this GPU."""
    config = plan.config
    if config.container.name == "custom":
        return
    image, labels = images.load()[config.container.name], facts["labels"]
    gfx, problem = config.hardware.gfx, None
    if labels.get("image") != image.name or labels.get("tag") != image.tag:
        built = f"{labels.get('image')}:{labels.get('tag')}"
        problem = (
            f"{image.reference} is out of date: it was built as {built}, and this repository "
            f"builds {image.tag}"
        )
    elif gfx.startswith("gfx") and not config.smoke and gfx not in labels.get("gfx", "").split(","):
        problem = f"the image has no code for {gfx}, only for {labels.get('gfx')}"
    if problem:
        rebuild = f"Rebuild it: python containers/build.py image={image.name}"
        raise HostError(f"container={image.name}: {problem}. {rebuild}")


def remove_orphans(client: docker.DockerClient, host: Host) -> list[str]:
    """Stop and remove our containers whose launcher is dead; return their names.

    A live launcher holds the lock of its run directory. If the engine cannot remove a container,
    usually because of a GPU process in uninterruptible sleep, report that and continue.
    """
    removed = []
    rows = client.api.containers(
        all=True, filters={"label": [f"{LABEL}.run", f"{LABEL}.uid={host.uid}"]}
    )
    # The end of a pause container kills the containers that joined it, so let them save first.
    for row in sorted(rows, key=lambda row: row["Labels"].get(f"{LABEL}.process") == PAUSE):
        labels, name = row["Labels"], row["Names"][0].lstrip("/")
        if not is_ours(name, labels, host) or rundir.is_locked(Path(labels[f"{LABEL}.run"])):
            continue
        print(f"{name}: removing this container, because its launcher has exited", file=sys.stderr)
        try:
            with contextlib.suppress(NotFound):
                remove(client.containers.get(row["Id"]))
            removed.append(name)
        except (APIError, requests.RequestException) as error:
            print(f"{name} cannot be removed: {explain(error)}", file=sys.stderr)
    return removed


def is_ours(name: str, labels: Mapping[str, str], host: Host) -> bool:
    """Return whether a container's labels and name are ours.

    Labels alone do not prove it, because an image committed from a container inherits them.
    """
    run, process = labels.get(f"{LABEL}.run", ""), labels.get(f"{LABEL}.process", "")
    return (
        bool(run)
        and labels.get(f"{LABEL}.uid") == str(host.uid)
        and name == container_name(Path(run), process)
    )


def remove(container: Container) -> None:
    """Remove a container. If it is running, stop it first, so that its processes can save."""
    with contextlib.suppress(NotFound):
        try:
            if container.status == "running":
                container.stop()
            container.remove(force=True)
        except APIError as error:
            if error.status_code != 409:  # another process is already removing it
                raise
            for _ in range(100):
                container.reload()
                time.sleep(0.1)
            raise


def highest_limits(client: docker.DockerClient, spec: ContainerSpec) -> dict[str, int]:
    """Return the caller's hard limits, if the engine lacks CAP_SYS_RESOURCE to exceed its own.

    A rootless engine never has that capability. One that runs in the caller's container has at most
    its capabilities. Of that one, memlock is not returned, because users usually have only 8 MB.
    Print what a limited memlock costs.
    """
    if spec.confinement:
        return {}
    bounds = re.search(r"CapBnd:\s*(\w+)", text(STATUS) or "")
    may_exceed = bounds is None or int(bounds[1], 16) >> CAP_SYS_RESOURCE & 1
    rootless = kind_of(client).rootless
    if may_exceed and not rootless:
        return {}
    limits = {n: resource.getrlimit(getattr(resource, f"RLIMIT_{n.upper()}"))[1] for n in LIMITS}
    if not rootless:
        del limits["memlock"]
    elif spec.memlock and limits["memlock"] != resource.RLIM_INFINITY:
        print(
            f"warning: {spec.name}: a rootless engine may lock only "
            f"{limits['memlock'] / 1e6:.0f} MB of memory, so RDMA and large pinned buffers may "
            "fail. Use: LimitMEMLOCK=infinity in the engine's service of systemd",
            file=sys.stderr,
        )
    return limits


def create(
    client: docker.DockerClient, spec: ContainerSpec, image_id: str, host: Host
) -> Container:
    """Create, but do not start, a container from the checked image."""
    make_mounted(spec)
    with host_errors():
        # We hold this run's lock, so a container of ours with this name belongs to a dead
        # launcher. If another user owns it, the engine rejects the name.
        with contextlib.suppress(NotFound):
            old = client.containers.get(spec.name)
            if is_ours(old.name, old.labels, host):
                remove(old)
        arguments = sdk_arguments(spec, highest_limits(client, spec))
        kind = kind_of(client)
        if kind.podman and spec.confinement:
            # podman rejects nr_inodes; the memory limit counts inodes. In a read-only container, it
            # adds writable file systems, where a job could leave files for later jobs.
            tmpfs = {p: re.sub(r",nr_inodes=\d+", "", t) for p, t in spec.confinement.tmpfs.items()}
            read_only = dict.fromkeys(("/run", "/var/tmp", "/sys/fs/cgroup"), "ro")
            arguments["host"]["tmpfs"] = read_only | tmpfs
        if kind.rootless:
            del arguments["host"]["group_add"]  # its gids are not those of the host
        host_config = client.api.create_host_config(**arguments["host"])
        if kind.rootless:
            host_config["Annotations"] = {KEEP_GROUPS: "1"}
        # The caller owns the files that ranks write, and is root in a rootless engine.
        caller = "0:0" if kind.rootless else f"{os.getuid()}:{os.getgid()}"
        user = spec.user if spec.confinement else caller
        settings = {"image": image_id, "user": user, "host_config": host_config}
        created = client.api.create_container(**{**arguments["container"], **settings})
        return client.containers.get(created["Id"])
