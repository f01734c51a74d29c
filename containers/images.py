"""What containers/images.lock.yaml says of each image, checked; and the tag that an image built from it carries.

Pure and quick: the launcher reads it for every plan. Nothing here talks to an engine.
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
LABEL = "io.rocm-recipes"  # in front of every label that we give to an image or a container
OCI = "org.opencontainers.image"  # in front of the labels that every image should have (specs.opencontainers.org)
TAG_LENGTH = 16
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
UNVERIFIED, UNKNOWN, UNBUILT, NONE = "unverified", "unknown", "unbuilt", "none"
VERSIONS = ("python", "torch", "rocm", "vllm", "trl")
# What every image is built with, beside its own Dockerfile and locks.
SHARED = ("install.py", "probe.py")


class LockError(Exception):
    """The lock file contradicts itself or lacks something: a maintainer's mistake, exit code 2."""


@dataclass(frozen=True)
class Image:
    """One entry. A version is what a public source states: `unknown` where none does, `none` where there is no such part."""

    name: str
    base: str  # repository:tag that the image is built from
    digest: str  # of that base, sha256:<64 hexadecimal digits>, or `unverified`
    python: str
    torch: str
    rocm: str
    vllm: str
    trl: str
    gfx: tuple[str, ...]  # GPU targets it serves; `cpu` where it computes without one
    size_gb: float | str  # of the base, as its source states it, or `unknown`
    source: str  # who states digest and versions
    dockerfile: str  # relative to containers/
    locks: tuple[str, ...]  # hashed requirements, relative to containers/, in the order of installation
    pushed: str  # repository:tag@sha256:... that `push=` wrote, or `unbuilt`

    @property
    def verified(self) -> bool:
        return self.digest != UNVERIFIED

    @property
    def base_reference(self) -> str:
        return f"{self.base}@{self.digest}" if self.verified else self.base

    @property
    def inputs(self) -> tuple[str, ...]:
        """Files that go into the image, relative to containers/."""
        return (self.dockerfile, *self.programs, *self.locks, *SHARED)

    @property
    def programs(self) -> tuple[str, ...]:
        """Those beside a Dockerfile of its own, relative to containers/."""
        folder = (FOLDER / self.dockerfile).parent
        return () if folder == FOLDER else tuple(sorted(str(file.relative_to(FOLDER)) for file in folder.glob("*.py")))

    @functools.cached_property
    def tag(self) -> str:
        """The hash of everything that goes in: the same tag is the same content."""
        total = hashlib.sha256(self.base_reference.encode())
        for name in self.inputs:
            total.update(f"{name}\0{hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()}\n".encode())
        return total.hexdigest()[:TAG_LENGTH]

    @property
    def local_reference(self) -> str:
        return f"{REPOSITORY}/{self.name}:{self.tag}"

    @property
    def reference(self) -> str:
        """What a run starts: the pushed image by its digest, else the one built on this machine.

        A push of other inputs than today's does not count: its tag is another.
        """
        repository, _, digest = self.pushed.partition(f":{self.tag}@")
        return f"{repository}@{digest}" if digest else self.local_reference


@functools.cache
def load(lock: Path = LOCK) -> dict[str, Image]:
    """Every entry by name. Raises LockError."""
    try:
        content = yaml.safe_load(lock.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LockError(f"{lock} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), dict):
        raise LockError(f"{lock}: one mapping `images` is expected, from a name to its entry.")
    return {name: entry(name, fields, lock) for name, fields in content["images"].items()}


def entry(name: str, fields: Any, lock: Path = LOCK) -> Image:
    """One checked entry. Raises LockError naming the field."""
    known = {f.name for f in dataclasses.fields(Image)} - {"name"}
    given = set(fields) if isinstance(fields, dict) else set()
    if given != known:
        wrong = [f"lacks {', '.join(sorted(known - given))}"] * bool(known - given) + [f"has {', '.join(sorted(given - known))}"] * bool(
            given - known
        )
        raise LockError(f"{lock}: images.{name} {' and '.join(wrong)}. Its fields are {', '.join(sorted(known))}.")
    for key in ("base", "digest", "pushed", "dockerfile", "source", *VERSIONS):
        if not isinstance(fields[key], str) or not fields[key]:
            raise LockError(f'{lock}: images.{name}.{key}={fields[key]!r}: text is expected (a version in quotes: "3.12").')
    for key in ("gfx", "locks"):
        if not isinstance(fields[key], list) or not all(isinstance(part, str) for part in fields[key]):
            raise LockError(f"{lock}: images.{name}.{key}={fields[key]!r}: a list of texts is expected, for example [cpu].")
    size = fields["size_gb"]
    if size != UNKNOWN and (isinstance(size, bool) or not isinstance(size, (int, float))):
        raise LockError(f"{lock}: images.{name}.size_gb={size!r}: a number of GB, or {UNKNOWN}.")
    image = Image(name=name, **{**fields, "gfx": tuple(fields["gfx"]), "locks": tuple(fields["locks"])})
    if image.verified and not DIGEST.fullmatch(image.digest):
        raise LockError(f"{lock}: images.{name}.digest={image.digest}: sha256: and 64 hexadecimal digits, or {UNVERIFIED}.")
    if image.pushed != UNBUILT and not re.fullmatch(rf"[^@\s]+:[0-9a-f]{{{TAG_LENGTH}}}@{DIGEST.pattern}", image.pushed):
        raise LockError(f"{lock}: images.{name}.pushed={image.pushed}: repository:tag@sha256:<digest>, or {UNBUILT}.")
    missing = [f for f in image.inputs if not (FOLDER / f).is_file()]
    if missing:
        raise LockError(f"{lock}: images.{name}: no such file: {', '.join(f'containers/{f}' for f in missing)}.")
    return image
