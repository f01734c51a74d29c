"""Read masks: environment variables that list a process's GPUs by index, counted per vendor.

Source: HIP's list of environment variables. HIP reads AMD's three variables, and also
CUDA_VISIBLE_DEVICES for programs written for CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from launch.machine.gpu import Gpu

ROCR = "ROCR_VISIBLE_DEVICES"  # below HIP, which renumbers the GPUs that this leaves
AMD = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
NVIDIA = ("CUDA_VISIBLE_DEVICES",)
ALL = (*AMD, ROCR)


def in_force(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return which of `names` are set. HIP ignores an empty one if another is set."""
    masks = {name: environ[name] for name in names if name in environ}
    return {name: value for name, value in masks.items() if value} or masks


def visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that the caller's masks leave visible.

    A mask without valid indices (UUIDs, too high) hides none.
    """
    hidden: list[Gpu] = []
    for names, is_amd in ((AMD, True), (NVIDIA, False)):
        mask = next(iter(in_force(names, environ).values()), None)
        counted = [gpu for gpu in gpus if gpu.usable and gpu.gfx.startswith("gfx") == is_amd]
        numbers = re.findall(r"\d+", mask or "") if re.fullmatch(r"[\d, ]*", mask or "") else []
        indices = set(map(int, numbers))
        if mask in ("", "-1") or indices & set(range(len(counted))):
            hidden += [gpu for index, gpu in enumerate(counted) if index not in indices]
    return tuple(gpu for gpu in gpus if gpu not in hidden)


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment updated with a process's own.

    If the process's own has a mask, the launcher's masks are dropped.
    """
    dropped = ALL if any(name in own for name in ALL) else ()
    return {**{name: v for name, v in os.environ.items() if name not in dropped}, **own}
