"""Read masks, the environment variables that list the visible GPUs of a process by index.

Each vendor numbers only its GPUs. HIP reads the three variables in AMD (HIP's list of environment
variables), including CUDA_VISIBLE_DEVICES for programs that were written for CUDA.
"""

import os
import re
from collections.abc import Mapping

from launch.machine.gpu import Gpu

ROCR = "ROCR_VISIBLE_DEVICES"  # applied before HIP's masks, which then number the remaining GPUs
AMD = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
NVIDIA = ("CUDA_VISIBLE_DEVICES",)
ALL = (*AMD, ROCR)


def active(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the masks among `names` that take effect, in the same order.

    HIP ignores an empty mask if another is set.
    """
    masks = {name: environ[name] for name in names if name in environ}
    return {name: value for name, value in masks.items() if value} or masks


def visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that the caller's masks leave visible.

    A mask without a valid index, for example one of UUIDs, hides no GPU.
    """
    hidden: list[Gpu] = []
    for names, is_amd in ((AMD, True), (NVIDIA, False)):
        mask = next(iter(active(names, environ).values()), None)
        numbered = [gpu for gpu in gpus if gpu.usable and gpu.is_amd == is_amd]
        numbers = re.findall(r"\d+", mask or "") if re.fullmatch(r"[\d, ]*", mask or "") else []
        indices = set(map(int, numbers))
        if mask in ("", "-1") or indices & set(range(len(numbered))):
            hidden += [gpu for index, gpu in enumerate(numbered) if index not in indices]
    return tuple(gpu for gpu in gpus if gpu not in hidden)


def merged_environ(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment, updated with the variables of a process.

    If they include a mask, the launcher's masks are dropped.
    """
    dropped = ALL if any(name in variables for name in ALL) else ()
    return {**{name: v for name, v in os.environ.items() if name not in dropped}, **variables}
