"""Install an image's packages in a container of its base, with the host's settings for pip.

A container can have mounts and files that reach no layer of an image. Only its /opt/recipes does.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import docker.errors

from containers import causes, engine, images, pip_settings
from containers.images import FOLDER, Image
from containers.progress import Phase
from containers.verify import LAST_LINES, BuildFailed
from launch.core.errors import HostError

BLOCK = tarfile.BLOCKSIZE
TAR_END = bytes(2 * BLOCK)
INSIDE = "opt/recipes-build"  # of the installing container; no part of the image
CACHE = "rocm-recipes-pip"  # the volume with the files that pip has downloaded
# The container has the host's network, because an index or a proxy may be on localhost. SELinux may
# deny access to mounted folders unless labels are disabled.
INSTALLING: dict[str, Any] = {"network_mode": "host", "security_opt": ["label=disable"]}
UNAVAILABLE = (
    "Use a network that reaches an index with the file, or set PIP_FIND_LINKS=<folder with the "
    "file>."
)


@contextlib.contextmanager
def container(
    client: docker.DockerClient, image: Image, base: str, settings: Mapping[str, str]
) -> Iterator[str]:
    """Yield a container of the base that is ready to install the image's locks."""
    config = client.api.create_host_config(
        mounts=[
            docker.types.Mount(f"/{INSIDE}/cache", CACHE),
            *(
                docker.types.Mount(str(folder), str(folder), type="bind", read_only=True)
                for folder in pip_settings.local_folders(settings)
            ),
        ],
        **INSTALLING,
    )
    files = {f"{i}-{Path(lock).name}": FOLDER / lock for i, lock in enumerate(image.locks)}
    files = {f"locks/{name}": file for name, file in files.items()}
    files |= {name: FOLDER / name for name in images.SHARED}
    inside = {**settings, "PIP_CACHE_DIR": f"/{INSIDE}/cache"}
    for option in ("PIP_CERT", "PIP_CLIENT_CERT"):
        if (file := Path(settings.get(option, ""))).is_file():
            files[option], inside[option] = file, f"/{INSIDE}/{option}"
    content = {f"{INSIDE}/{name}": file.read_bytes() for name, file in files.items()}
    content[f"{INSIDE}/settings.json"] = json.dumps(inside).encode()
    argv = [engine.PYTHON, "-B", f"/{INSIDE}/install.py"]
    with engine.container(client, base, argv, host_config=config, user="0:0") as new:
        # As files, because `docker inspect` would show passwords in variables.
        client.api.put_archive(new, "/", b"".join(tar(content)))
        yield new


def install(
    client: docker.DockerClient,
    image: Image,
    container: str,
    settings: Mapping[str, str],
    phase: Phase,
) -> Iterator[bytes]:
    """Install the locks in the container, and return its /opt/recipes as a tar."""
    try:
        code, lines = engine.start(client, container, phase.say)
    except docker.errors.APIError as error:
        python = f"The base must run {engine.PYTHON}, 3.10 or newer"
        raise HostError(f"{python}: {error.explanation}") from error
    if code:
        raise failure(image, code, lines, settings)
    phase.result = lines[-1]
    archive: Iterator[bytes] = client.api.get_archive(container, "/opt/recipes")[0]
    return archive


def tar(files: Mapping[str, bytes], rest: Iterable[bytes] = (TAR_END,)) -> Iterator[bytes]:
    """Yield a tar of files whose owners, modes and times do not depend on the machine.

    `rest` is the end of a tar, or another tar.
    """
    for name, content in files.items():
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o644
        yield member.tobuf(tarfile.PAX_FORMAT)
        yield content + bytes(-len(content) % BLOCK)
    yield from rest


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
