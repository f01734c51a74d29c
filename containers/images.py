"""Read and check containers/images.lock.yaml, and compute the tags of images.

Every plan needs this, so this module does not use docker.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from launch.core.errors import UserError
from launch.core.json_files import yaml_file

FOLDER = Path(__file__).parent
LOCK = FOLDER / "images.lock.yaml"
REPOSITORY = "rocm-recipes"  # local images are rocm-recipes/<name>:<tag>
LABEL = "io.rocm-recipes"  # prefix of our labels for images and containers
OCI = "org.opencontainers.image"  # prefix of the labels of specs.opencontainers.org
UNVERIFIED, UNKNOWN, NONE = "unverified", "unknown", "none"
VERSIONS = ("python", "torch", "rocm", "rccl", "vllm", "aiter", "flash_attn", "trl")
INSTALL = "install.py"  # installs the locks of every image
# An unpacked image takes 4 to 4.7 times its download (rocm/primus: 14.1 GB and 54.8, rocm/vllm:
# 10.8 and 50.4). The rest is for layers on their way.
UNPACKED = 5.0
CPU_GB = 5.0  # our choice: the image cpu has 1.6 GB, and its packages are installed in a copy
UNKNOWN_GB = 100.0  # our choice, for another base whose size is not published
SPACE_REMEDY = 'docker system df; docker image prune; "data-root" in /etc/docker/daemon.json'


@dataclass(frozen=True)
class Image:
    """An entry of the lock file, which describes the fields and their special values."""

    name: str
    base: str  # repository:tag that the image is built from
    digest: str  # of the base
    python: str
    torch: str
    rocm: str
    rccl: str
    vllm: str
    aiter: str
    flash_attn: str
    trl: str
    gfx: list[str]  # supported GPU targets; `cpu` for an image without GPU support
    source: str  # where digest and versions are published
    dockerfile: str  # relative to containers/
    locks: list[str]  # hashed requirements in order of installation, relative to containers/
    pushed: str  # repository:tag@sha256:...
    tools: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    download_gb: str = UNKNOWN

    @property
    def verified(self) -> bool:
        return self.digest != UNVERIFIED

    @property
    def base_reference(self) -> str:
        return f"{self.base}@{self.digest}" if self.verified else self.base

    @property
    def needed_gb(self) -> float:
        """Return the space on the engine's disk that pulling the base and building need."""
        if self.download_gb != UNKNOWN:
            return UNPACKED * float(self.download_gb)
        return CPU_GB if self.gfx == ["cpu"] else UNKNOWN_GB

    def space_problem(self, folder: str, free_gb: float) -> str | None:
        """Return why the disk of the engine's folder is too small; None if the image fits."""
        if free_gb >= self.needed_gb:
            return None
        return (
            f"image={self.name}: {free_gb:.0f} GB are free for {folder}, but {self.base} needs "
            f"{self.needed_gb:.0f} GB. Free space: {SPACE_REMEDY}. If you know that it fits: "
            f"docker pull {self.base_reference}"
        )

    @functools.cached_property
    def tag(self) -> str:
        """Return a hash of the base and of all files that the image is built from."""
        dockerfile = FOLDER / self.dockerfile
        is_alone = dockerfile.parent != FOLDER  # in a folder with the image's own programs
        programs = sorted(dockerfile.parent.glob("*.py")) if is_alone else [FOLDER / INSTALL]
        files = [dockerfile, *programs, *(FOLDER / lock for lock in self.locks)]
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        return hashlib.sha256("\n".join([self.base_reference, *digests]).encode()).hexdigest()[:16]

    @property
    def local_reference(self) -> str:
        return f"{REPOSITORY}/{self.name}:{self.tag}"

    @property
    def reference(self) -> str:
        """Return the reference that runs use: the pushed image's digest, or else the local image.

        A pushed image with another tag is ignored, because it was built from other inputs.
        """
        repository, _, digest = self.pushed.partition(f":{self.tag}@")
        return f"{repository}@{digest}" if digest else self.local_reference


@functools.cache
def load(lock: Path = LOCK) -> dict[str, Image]:
    """Return the images of the lock by name. Raises UserError."""
    try:
        entries = dict(yaml_file(lock)["images"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{lock} cannot be read as a mapping of images: {reason}") from error
    return {name: entry(name, fields, lock) for name, fields in entries.items()}


def entry(name: str, content: Any, lock: Path = LOCK) -> Image:
    """Return an entry as an Image. Raises UserError for a wrong field."""
    try:
        image = Image(name, **(content or {}))
    except TypeError as error:  # a missing or an unknown field
        raise UserError(f"{lock}: images.{name}: {error}") from error
    for each in fields(Image):
        value, kind = getattr(image, each.name), str(each.type).partition("[")[0]
        if type(value).__name__ != kind:  # such as 3.12, a number without quotes
            raise UserError(f"{lock}: images.{name}.{each.name} must be a {kind}, not {value!r}")
    return image
