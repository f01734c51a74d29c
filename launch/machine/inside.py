"""Detect that this program runs in a container that somebody else started."""

import re
from collections.abc import Mapping
from pathlib import Path

from launch.machine.sysfs import status_of, text

ROOT = Path("/")
DOCKER_HOST, POD = "DOCKER_HOST", "KUBERNETES_SERVICE_HOST"
MARKERS = (".dockerenv", "run/.containerenv")  # of docker, and of podman and toolbox
# parts of a container's control group; empty if the container has a namespace of its own
CGROUPS = re.compile("docker|containerd|kubepods|libpod|lxc")


def container(environ: Mapping[str, str], root: Path | None = None) -> bool:
    """Return whether this is a container of docker, podman, Kubernetes or LXC."""
    root = root or ROOT
    return (
        any(status_of(root / marker) for marker in MARKERS)
        or CGROUPS.search(text(root / "proc/1/cgroup") or "") is not None
        or POD in environ
    )


def rented(environ: Mapping[str, str], root: Path | None = None) -> bool:
    """Return whether this is a container with AMD's GPUs and without a docker engine."""
    root = root or ROOT
    has_engine = DOCKER_HOST in environ or status_of(root / "var/run/docker.sock")
    has_gpus = status_of(root / "dev/kfd")
    return bool(has_gpus) and not has_engine and container(environ, root)
