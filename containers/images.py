"""Read and check containers/images.lock.yaml, and compute the tags of images.

The launcher does so for every plan, so nothing here talks to an engine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
LOCK = FOLDER / "images.lock.yaml"
REPOSITORY = "rocm-recipes"  # local images are rocm-recipes/<name>:<tag>
LABEL = "io.rocm-recipes"  # prefix of every label that we give to an image or a container
OCI = "org.opencontainers.image"  # prefix of the labels of specs.opencontainers.org
TAG_LENGTH = 16
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
UNVERIFIED, UNKNOWN, UNBUILT, NONE = "unverified", "unknown", "unbuilt", "none"
VERSIONS = ("python", "torch", "rocm", "vllm", "trl")
# The files that every image is built with, in addition to its own Dockerfile and locks.
SHARED = ("install.py", "probe.py")


class LockError(Exception):
    """The lock file is inconsistent or incomplete: a maintainer's mistake, exit code 2."""


@dataclass(frozen=True)
class Image:
    """An entry of the lock file.

    Versions come from a public source. They are `unknown` if no source has them, and `none` if the
    image lacks the package.
    """

    name: str
    base: str  # repository:tag that the image is built from
    digest: str  # of that base, sha256:<64 hexadecimal digits>, or `unverified`
    python: str
    torch: str
    rocm: str
    vllm: str
    trl: str
    gfx: tuple[str, ...]  # GPU targets that it supports; `cpu` if it computes without a GPU
    size_gb: float | str  # of the base, as its source states it, or `unknown`
    source: str  # where digest and versions are published
    dockerfile: str  # relative to containers/
    locks: tuple[str, ...]  # hashed requirements in order of installation, relative to containers/
    pushed: str  # repository:tag@sha256:... that `push=` wrote, or `unbuilt`

    @property
    def verified(self) -> bool:
        return self.digest != UNVERIFIED

    @property
    def base_reference(self) -> str:
        return f"{self.base}@{self.digest}" if self.verified else self.base

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the files that go into the image, relative to containers/."""
        return (self.dockerfile, *self.programs, *self.locks, *SHARED)

    @property
    def programs(self) -> tuple[str, ...]:
        """Return the programs next to the image's own Dockerfile, relative to containers/."""
        folder = (FOLDER / self.dockerfile).parent
        if folder == FOLDER:
            return ()
        return tuple(sorted(str(file.relative_to(FOLDER)) for file in folder.glob("*.py")))

    @functools.cached_property
    def tag(self) -> str:
        """Return a hash of the base and all inputs, so that the same tag has the same content."""
        total = hashlib.sha256(self.base_reference.encode())
        for name in self.inputs:
            digest = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
            total.update(f"{name}\0{digest}\n".encode())
        return total.hexdigest()[:TAG_LENGTH]

    @property
    def local_reference(self) -> str:
        return f"{REPOSITORY}/{self.name}:{self.tag}"

    @property
    def reference(self) -> str:
        """Return the image that runs use: the pushed one by its digest, or else the local one.

        A pushed image with another tag was built from other inputs, so it is not used.
        """
        repository, _, digest = self.pushed.partition(f":{self.tag}@")
        return f"{repository}@{digest}" if digest else self.local_reference


@functools.cache
def load(lock: Path = LOCK) -> dict[str, Image]:
    """Return every entry of the lock by name. Raises LockError."""
    try:
        content = yaml.safe_load(lock.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LockError(f"{lock} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), dict):
        raise LockError(f"{lock}: one mapping `images` is expected, from a name to its entry.")
    return {name: entry(name, fields, lock) for name, fields in content["images"].items()}


def entry(name: str, fields: Any, lock: Path = LOCK) -> Image:
    """Return the image of a valid entry. Raises LockError with the name of the wrong field."""
    known = {f.name for f in dataclasses.fields(Image)} - {"name"}
    present = set(fields) if isinstance(fields, dict) else set()
    if present != known:
        groups = {"lacks": sorted(known - present), "has": sorted(present - known)}
        wrong = " and ".join(f"{verb} {', '.join(keys)}" for verb, keys in groups.items() if keys)
        raise LockError(
            f"{lock}: images.{name} {wrong}. Its fields are {', '.join(sorted(known))}."
        )
    for key in ("base", "digest", "pushed", "dockerfile", "source", *VERSIONS):
        if not isinstance(fields[key], str) or not fields[key]:
            raise LockError(
                f"{lock}: images.{name}.{key}={fields[key]!r}: text is expected, in quotes."
            )
    for key in ("gfx", "locks"):
        value = fields[key]
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise LockError(
                f"{lock}: images.{name}.{key}={value!r}: a list of texts is expected, for example "
                "[cpu]."
            )
    size = fields["size_gb"]
    if size != UNKNOWN and (isinstance(size, bool) or not isinstance(size, (int, float))):
        raise LockError(f"{lock}: images.{name}.size_gb={size!r}: a number of GB, or {UNKNOWN}.")
    lists = {"gfx": tuple(fields["gfx"]), "locks": tuple(fields["locks"])}
    image = Image(**{"name": name, **fields, **lists})
    if image.verified and not DIGEST.fullmatch(image.digest):
        raise LockError(
            f"{lock}: images.{name}.digest={image.digest}: sha256: and 64 hexadecimal digits, or "
            f"{UNVERIFIED}."
        )
    pushed = rf"[^@\s]+:[0-9a-f]{{{TAG_LENGTH}}}@{DIGEST.pattern}"
    if image.pushed != UNBUILT and not re.fullmatch(pushed, image.pushed):
        raise LockError(
            f"{lock}: images.{name}.pushed={image.pushed}: repository:tag@sha256:<digest>, or "
            f"{UNBUILT}."
        )
    missing = [f for f in image.inputs if not (FOLDER / f).is_file()]
    if missing:
        raise LockError(
            f"{lock}: images.{name}: no such file: {', '.join(f'containers/{f}' for f in missing)}."
        )
    return image
