"""Read and check containers/images.lock.yaml, and compute the tags of images.

Every plan needs this, so this module does not use docker.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from containers.tools import PRESENT, TOOLS
from launch.core.errors import UserError
from launch.core.json_files import yaml_file

FOLDER = Path(__file__).parent
LOCK = FOLDER / "images.lock.yaml"
REPOSITORY = "rocm-recipes"  # local images are rocm-recipes/<name>:<tag>
LABEL = "io.rocm-recipes"  # prefix of our labels for images and containers
OCI = "org.opencontainers.image"  # prefix of the labels of specs.opencontainers.org
TAG_LENGTH = 16
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
UNVERIFIED, UNKNOWN, UNBUILT, NONE = "unverified", "unknown", "unbuilt", "none"
VERSIONS = ("python", "torch", "rocm", "rccl", "vllm", "aiter", "flash_attn", "trl")
PATTERNS = {"digest": rf"{DIGEST.pattern}|{UNVERIFIED}", "download_gb": rf"[\d.]+|{UNKNOWN}"}
PATTERNS["pushed"] = rf"[^@\s]+:[0-9a-f]{{{TAG_LENGTH}}}@{DIGEST.pattern}|{UNBUILT}"
# Programs that are copied into every image.
SHARED = ("install.py", "probe.py")


@dataclass(frozen=True)
class Image:
    """An entry of the lock file.

    A version is `unknown` if no public source states it, and `none` if the image does not have the
    package.
    """

    name: str
    base: str  # repository:tag that the image is built from
    digest: str  # of the base, or `unverified`
    python: str
    torch: str
    rocm: str
    rccl: str
    vllm: str
    aiter: str
    flash_attn: str
    trl: str
    gfx: tuple[str, ...]  # supported GPU targets; `cpu` for an image without GPU support
    source: str  # where digest and versions are published
    dockerfile: str  # relative to containers/
    locks: tuple[str, ...]  # hashed requirements in order of installation, relative to containers/
    pushed: str  # repository:tag@sha256:... written by `push=`, or `unbuilt`
    # tool of containers/tools.py -> present or unknown; an image has no other tool
    tools: dict[str, str] = field(default_factory=dict)
    # environment variables of the base that change how a run computes or communicates
    env: dict[str, str] = field(default_factory=dict)
    download_gb: str = UNKNOWN  # size of the base, compressed

    @property
    def verified(self) -> bool:
        return self.digest != UNVERIFIED

    @property
    def base_reference(self) -> str:
        return f"{self.base}@{self.digest}" if self.verified else self.base

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the files that the image is built from, relative to containers/."""
        return (self.dockerfile, *self.programs, *self.locks, *SHARED)

    @property
    def programs(self) -> tuple[str, ...]:
        """Return the programs next to the Dockerfile if it is in a subfolder of containers/."""
        folder = (FOLDER / self.dockerfile).parent
        if folder == FOLDER:
            return ()
        return tuple(sorted(str(file.relative_to(FOLDER)) for file in folder.glob("*.py")))

    @functools.cached_property
    def tag(self) -> str:
        """Return a hash of the base and all input files."""
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
        """Return the reference that runs use: the pushed image's digest, or else the local image.

        A pushed image with another tag is ignored, because it was built from other inputs.
        """
        repository, _, digest = self.pushed.partition(f":{self.tag}@")
        return f"{repository}@{digest}" if digest else self.local_reference


@functools.cache
def load(lock: Path = LOCK) -> dict[str, Image]:
    """Return the images of the lock by name. Raises UserError."""
    try:
        content = yaml_file(lock)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{lock} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), dict):
        raise UserError(f"{lock}: the key `images` must be a mapping of names to entries.")
    return {name: entry(name, fields, lock) for name, fields in content["images"].items()}


def entry(name: str, content: Any, lock: Path = LOCK) -> Image:
    """Return an entry as an Image. Raises UserError for invalid fields and missing files."""
    values = {"name": name, "download_gb": UNKNOWN, **dict(content or {})}
    declared = {f.name: f for f in fields(Image)}
    faults = {key: "unknown field" for key in values if key not in declared}
    for key, declaration in declared.items():
        value, pattern = values.get(key), PATTERNS.get(key, "(?s).+")
        if str(declaration.type).startswith("tuple"):
            values[key] = tuple(value) if isinstance(value, (list, tuple)) else value
            if type(values[key]) is not tuple or not all(isinstance(v, str) for v in values[key]):
                faults[key] = "must be a list of strings"
        elif key == "env":
            if not isinstance(value, dict) or not all(
                isinstance(part, str) for pair in value.items() for part in pair
            ):
                faults[key] = "must map names of variables to strings"
        elif str(declaration.type).startswith("dict"):
            states = value.items() if isinstance(value, dict) else [("", "")]
            if any(tool not in TOOLS or state not in (PRESENT, UNKNOWN) for tool, state in states):
                states_text = f"{PRESENT} or {UNKNOWN}"
                faults[key] = f"must map names of {', '.join(TOOLS)} to {states_text}"
        elif not isinstance(value, str) or not re.fullmatch(pattern, value):
            faults[key] = f"must be a string that matches {pattern}, but is {value!r}"
    if faults:
        at = f"{lock}: images.{name}"
        raise UserError("\n".join(f"{at}.{key}: {fault}." for key, fault in faults.items()))
    image = Image(**values)
    missing = [file for file in image.inputs if not (FOLDER / file).is_file()]
    if missing:
        files = ", ".join(f"containers/{file}" for file in missing)
        raise UserError(f"{lock}: images.{name}: missing files: {files}.")
    return image
