"""Install an image's packages in a container of its base, with the host's settings for pip.

A container can have mounts, unlike the classic builder. Only its /opt/recipes reaches the image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker

from containers import causes, engine, pip_settings
from containers.images import FOLDER, INSTALL, Image
from containers.progress import Phase
from containers.verify import LAST_LINES, BuildFailed
from launch.core.errors import HostError

INSIDE = "opt/recipes-build"  # of the installing container; install.py removes it
PIP_CACHE = "/opt/recipes-cache"
CACHE_VOLUME = "rocm-recipes-pip"  # keeps the files that pip has downloaded
# The container has the host's network, because an index or a proxy may be on localhost. SELinux may
# deny access to mounted folders unless labels are disabled.
INSTALLING: dict[str, Any] = {"network_mode": "host", "security_opt": ["label=disable"]}
UNAVAILABLE = (
    "Use a network that reaches an index with the file, or set PIP_FIND_LINKS=<folder with the "
    "file>."
)


def install(client: docker.DockerClient, image: Image, base: str, phase: Phase) -> str:
    """Install the image's locks in a container of the base, and return an unnamed image of it.

    Raises HostError, BuildFailed.
    """
    settings = pip_settings.for_container(pip_settings.pip_options(), os.environ)
    mounts = [docker.types.Mount(PIP_CACHE, CACHE_VOLUME)]
    for folder in pip_settings.local_folders(settings):
        mounts.append(docker.types.Mount(folder, folder, type="bind", read_only=True))
    argv = ["python3", "-B", f"/{INSIDE}/{INSTALL}"]
    options = {"mounts": mounts, "user": "0:0", **INSTALLING}
    # Settings are in a file, because `docker inspect` would show passwords in variables.
    files = files_for(image, settings)
    with engine.ran(client, base, argv, files, phase.say, **options) as (code, lines, container):
        if code:
            raise failure(image, code, lines, settings)
        phase.result = lines[-1]
        return str(container.commit().id)


def files_for(image: Image, settings: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files for the container: install.py, locks, and pip's settings."""
    files = {f"locks/{i}-{Path(lock).name}": FOLDER / lock for i, lock in enumerate(image.locks)}
    files[INSTALL], inside = FOLDER / INSTALL, {**settings, "PIP_CACHE_DIR": PIP_CACHE}
    for option in ("PIP_CERT", "PIP_CLIENT_CERT"):
        if (file := Path(settings.get(option, ""))).is_file():
            files[option], inside[option] = file, f"/{INSIDE}/{option}"
    content = {f"{INSIDE}/{name}": file.read_bytes() for name, file in files.items()}
    return {**content, f"{INSIDE}/settings.json": json.dumps(inside).encode()}


def log_file(image: Image) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rocm-recipes" / "logs" / f"{image.name}-{image.tag}.log"


def failure(
    image: Image, code: int, lines: list[str], settings: Mapping[str, str] = {}
) -> Exception:
    """Return a HostError for a cause outside the locks, else a BuildFailed.

    The message contains install.py's error, or else the last lines of output.
    """
    output = "\n".join(lines)
    reason = [line for line in output.rpartition("error: ")[2].splitlines() if line.strip()]
    where = f"The complete output is in {log_file(image)}"
    message = "\n".join([f"The build of {image.name} failed:", *reason[-LAST_LINES:], where])
    remedy = causes.full_disk(output, causes.DOCKER)
    if code == 4 and not remedy:
        return BuildFailed(message)
    return HostError(f"{message}\n{remedy or causes.wrong_proxy(output, settings) or UNAVAILABLE}")
