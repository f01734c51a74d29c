"""Print the versions and GPU targets in an image as a line of JSON. Needs only Python.

containers/build.py runs it in an image before it names the image.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from pathlib import Path

# The ROCm version in AMD's images. HIP's version can differ: ROCm 10.0 has HIP 7.15.
ROCM_VERSION = Path("/opt/rocm/.info/version")
# Distributions. Nothing is imported, since vLLM's import takes half a minute.
PACKAGES = {"vllm": "vllm", "flash_attn": "flash_attn", "aiter": "amd-aiter", "trl": "trl"}


def torch_facts() -> dict[str, str | None]:
    """Return the versions and GPU targets of torch, without features such as :sramecc+:xnack-."""
    import torch

    installed, hip = str(torch.__version__), torch.version.hip
    rocm = hip
    if ROCM_VERSION.is_file():
        rocm = ROCM_VERSION.read_text(encoding="utf-8").strip()
    elif match := re.search(r"\+.*?rocm(\d+(?:\.\d+)+)", installed):  # 2.13.0+rocm7.2
        rocm = match[1]
    # torch.cuda.get_arch_list() is empty without a GPU. CPU builds do not have this function.
    flags = getattr(torch._C, "_cuda_getArchFlags", str)() or ""
    gfx = " ".join(sorted({name.split(":")[0] for name in flags.split()}))
    has_rccl = hasattr(torch._C, "_nccl_version")
    rccl = ".".join(map(str, torch.cuda.nccl.version())) if has_rccl else None
    return {"torch": installed, "hip": hip, "rocm": rocm, "gfx": gfx, "rccl": rccl}


if __name__ == "__main__":
    facts: dict[str, str | None] = {"python": platform.python_version()}
    if importlib.util.find_spec("torch"):
        facts |= torch_facts()
    for name, distribution in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(distribution)
    print(json.dumps(facts))
