"""Install an image's packages in a container of its base, with the host's settings for pip.

A container can have mounts, unlike the classic builder. Only its /opt/recipes reaches the image.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker
import docker.errors

from containers import causes, engine, images, pip_settings
from containers.images import FOLDER, LABEL, Image
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


def install(
    client: docker.DockerClient,
    image: Image,
    base: str,
    settings: Mapping[str, str],
    phase: Phase,
) -> str:
    """Install the image's locks in a container of the base, and return an unnamed image of it.

    Raises HostError, BuildFailed.
    """
    folders = [
        docker.types.Mount(str(folder), str(folder), type="bind", read_only=True)
        for folder in pip_settings.local_folders(settings)
    ]
    mounts = [docker.types.Mount(PIP_CACHE, CACHE_VOLUME), *folders]
    config = client.api.create_host_config(mounts=mounts, **INSTALLING)
    argv = [engine.PYTHON, "-B", f"/{INSIDE}/install.py"]
    with engine.container(client, base, argv, host_config=config, user="0:0") as container:
        # As files, because `docker inspect` would show passwords in variables.
        client.api.put_archive(container, "/", tar(files_for(image, settings)))
        try:
            code, lines = engine.start(client, container, phase.say)
        except docker.errors.APIError as error:
            python = f"The base must run {engine.PYTHON}, 3.10 or newer"
            raise HostError(f"{python}: {error.explanation}") from error
        if code:
            raise failure(image, code, lines, settings)
        phase.result = lines[-1]
        labels = f"LABEL {LABEL}.image={image.name}"
        installed: str = client.api.commit(container, changes=[labels])["Id"]
        return installed


def files_for(image: Image, settings: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files for the container: install.py, locks, and pip's settings."""
    files = {name: FOLDER / name for name in images.SHARED}
    for i, lock in enumerate(image.locks):
        files[f"locks/{i}-{Path(lock).name}"] = FOLDER / lock
    inside = {**settings, "PIP_CACHE_DIR": PIP_CACHE}
    for option in ("PIP_CERT", "PIP_CLIENT_CERT"):
        if (file := Path(settings.get(option, ""))).is_file():
            files[option], inside[option] = file, f"/{INSIDE}/{option}"
    content = {f"{INSIDE}/{name}": file.read_bytes() for name, file in files.items()}
    return {**content, f"{INSIDE}/settings.json": json.dumps(inside).encode()}


def tar(files: Mapping[str, bytes]) -> bytes:
    """Return a tar of files whose owners, modes and times do not depend on the machine."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            opened.addfile(member, io.BytesIO(content))
    return archive.getvalue()


# ---- Failures


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
    reason = output.rpartition("error: ")[2].splitlines() if "error: " in output else lines
    message = "\n".join(
        [
            f"The build of {image.name} failed:",
            *[line for line in reason if line.strip()][-LAST_LINES:],
            f"The complete output is in {log_file(image)}",
        ]
    )
    remedy = causes.full_disk(output, "Docker's disk", engine.FREE)
    if code == 4 and not remedy:
        return BuildFailed(message)
    return HostError(f"{message}\n{remedy or causes.wrong_proxy(output, settings) or UNAVAILABLE}")
