"""Print the versions and GPU targets in an image as a line of JSON. Needs only Python.

docker run --rm --network none IMAGE python /opt/recipes/probe.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
from pathlib import Path
from typing import Any

# The ROCm version in AMD's images. HIP's version can differ: ROCm 10.0 has HIP 7.15.
ROCM_VERSION = Path("/opt/rocm/.info/version")


PACKAGES = ("vllm", "aiter", "flash_attn", "trl", "transformers")
# Names of packages whose distribution has another name.
DISTRIBUTIONS = {"aiter": "amd-aiter"}


def version(package: str) -> str | None:
    """Return a package's version without importing it, since vLLM's import takes half a minute."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def targets(torch: Any) -> list[str]:
    """Return torch's GPU targets without features such as :sramecc+:xnack-."""
    # Without a GPU, torch.cuda.get_arch_list() is empty.
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    names = (flags() or "").split() if flags else torch.cuda.get_arch_list()
    return sorted({name.split(":")[0] for name in names})


def rccl(torch: Any) -> str | None:
    """Return the version of torch's RCCL or NCCL, or None for a CPU build."""
    if not hasattr(torch._C, "_nccl_version"):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def rocm(torch_version: str, hip: str | None) -> str | None:
    """Return ROCm's version from the installation, torch's version (2.13.0+rocm7.2) or HIP's."""
    if ROCM_VERSION.is_file():
        return ROCM_VERSION.read_text(encoding="utf-8").strip()
    local = re.search(r"\+.*?rocm(\d+(?:\.\d+)+)", torch_version)
    return local.group(1) if local else hip


def torch_facts() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"torch": None, "hip": None, "cuda": None, "rocm": None, "gfx": [], "rccl": None}
    import torch

    version, hip = str(torch.__version__), torch.version.hip
    return {
        "torch": version,
        "hip": hip,
        "cuda": torch.version.cuda,
        "rocm": rocm(version, hip),
        "gfx": targets(torch),
        "rccl": rccl(torch),
    }


def probe() -> dict[str, Any]:
    packages = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return {
        "python": platform.python_version(),
        **torch_facts(),
        **{name: version(name) for name in PACKAGES},
        "packages": len(packages),
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
