"""Print the versions and GPU targets in an image as a line of JSON. Needs only Python.

containers/build.py runs it in an image before it names the image.
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
# Name -> distribution. Nothing is imported, since vLLM's import takes half a minute.
PACKAGES = {name: name for name in ("vllm", "flash_attn", "trl", "transformers")}
PACKAGES["aiter"] = "amd-aiter"


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict[str, Any]:
    """Return the versions and GPU targets of torch, without features such as :sramecc+:xnack-."""
    if importlib.util.find_spec("torch") is None:
        return {**dict.fromkeys(("torch", "hip", "cuda", "rocm", "rccl")), "gfx": []}
    import torch

    installed, hip = str(torch.__version__), torch.version.hip
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    # Without a GPU, torch.cuda.get_arch_list() is empty.
    names = (flags() or "").split() if flags else torch.cuda.get_arch_list()
    rocm = re.search(r"\+.*?rocm(\d+(?:\.\d+)+)", installed)  # 2.13.0+rocm7.2
    has_nccl = hasattr(torch._C, "_nccl_version")  # or RCCL
    return {
        "torch": installed,
        "hip": hip,
        "cuda": torch.version.cuda,
        "rocm": rocm[1] if rocm else hip,
        "gfx": sorted({name.split(":")[0] for name in names}),
        "rccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    }


if __name__ == "__main__":
    facts = {"python": platform.python_version(), **torch_facts()}
    if facts["torch"] and ROCM_VERSION.is_file():
        facts["rocm"] = ROCM_VERSION.read_text(encoding="utf-8").strip()
    facts |= {name: version(distribution) for name, distribution in PACKAGES.items()}
    facts["packages"] = len({dist.metadata["Name"] for dist in importlib.metadata.distributions()})
    print(json.dumps(facts))
