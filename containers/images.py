"""Read and check containers/images.lock.yaml, and compute the tags of images.

The launcher does so for every plan, so nothing here talks to an engine.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from launch.core.errors import UserError
from launch.core.json_files import yaml_file

FOLDER = Path(__file__).parent
LOCK = FOLDER / "images.lock.yaml"
REPOSITORY = "rocm-recipes"  # local images are rocm-recipes/<name>:<tag>
LABEL = "io.rocm-recipes"  # prefix of every label that we give to an image or a container
OCI = "org.opencontainers.image"  # prefix of the labels of specs.opencontainers.org
TAG_LENGTH = 16
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
UNVERIFIED, UNKNOWN, UNBUILT, NONE = "unverified", "unknown", "unbuilt", "none"
VERSIONS = ("python", "torch", "rocm", "vllm", "trl")
PATTERNS = {"digest": rf"{DIGEST.pattern}|{UNVERIFIED}"}
PATTERNS["pushed"] = rf"[^@\s]+:[0-9a-f]{{{TAG_LENGTH}}}@{DIGEST.pattern}|{UNBUILT}"
# The files that every image is built with, in addition to its own Dockerfile and locks.
SHARED = ("install.py", "probe.py")


@dataclass(frozen=True)
class Image:
    """An entry of the lock file: texts that are not empty, and lists of texts.

    Versions come from a public source. They are `unknown` if no source has them, and `none` if the
    image lacks the package.
    """

    name: str
    base: str  # repository:tag that the image is built from
    digest: str  # of that base
    python: str
    torch: str
    rocm: str
    vllm: str
    trl: str
    gfx: tuple[str, ...]  # GPU targets that it supports; `cpu` if it computes without a GPU
    source: str  # where digest and versions are published
    dockerfile: str  # relative to containers/
    locks: tuple[str, ...]  # hashed requirements in order of installation, relative to containers/
    # repository:tag@sha256:... that `push=` wrote
    pushed: str

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
    """Return every entry of the lock by name. Raises UserError."""
    try:
        content = yaml_file(lock)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{lock} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), dict):
        raise UserError(f"{lock}: expected one mapping `images` from names to entries.")
    return {name: entry(name, fields, lock) for name, fields in content["images"].items()}


def entry(name: str, content: Any, lock: Path = LOCK) -> Image:
    """Return the image of a valid entry. Raises UserError with the names of the wrong fields."""
    values = {"name": name, **dict(content or {})}
    declared = {f.name: f for f in fields(Image)}
    faults = {key: "no such field" for key in values if key not in declared}
    for key, declaration in declared.items():
        value, pattern = values.get(key), PATTERNS.get(key, "(?s).+")
        if str(declaration.type).startswith("tuple"):
            values[key] = tuple(value) if isinstance(value, (list, tuple)) else value
            if type(values[key]) is not tuple or not all(isinstance(v, str) for v in values[key]):
                faults[key] = "it must be a list of texts"
        elif not isinstance(value, str) or not re.fullmatch(pattern, value):
            faults[key] = f"it must be a text that matches {pattern}, but is {value!r}"
    if faults:
        at = f"{lock}: images.{name}"
        raise UserError("\n".join(f"{at}.{key}: {fault}." for key, fault in faults.items()))
    image = Image(**values)
    missing = [file for file in image.inputs if not (FOLDER / file).is_file()]
    if missing:
        files = ", ".join(f"containers/{file}" for file in missing)
        raise UserError(f"{lock}: images.{name}: no such file: {files}.")
    return image
