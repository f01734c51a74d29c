"""Masks: environment variables that choose which GPUs a process sees, by index among those of one maker.

Source: HIP's list of environment variables. It reads the three of AMD; CUDA_VISIBLE_DEVICES is there for programs written for CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from launch.machine.gpu import Gpu

ROCR = "ROCR_VISIBLE_DEVICES"  # below HIP, which counts anew what it leaves
AMD = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
NVIDIA = ("CUDA_VISIBLE_DEVICES",)
ALL = (*AMD, ROCR)


def given(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Those of `names` that are set; HIP ignores an empty one beside another."""
    found = {name: environ[name] for name in names if name in environ}
    return {name: value for name, value in found.items() if value} or found


def visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Without those that the caller's masks leave out. A mask that holds no index of these GPUs (UUIDs, one too high) leaves out none."""
    hidden: list[Gpu] = []
    for names, is_amd in ((AMD, True), (NVIDIA, False)):
        mask = next(iter(given(names, environ).values()), None)
        counted = [gpu for gpu in gpus if gpu.usable and gpu.gfx.startswith("gfx") == is_amd]
        indices = {int(index) for index in re.findall(r"\d+", mask or "")} if re.fullmatch(r"[\d, ]*|-1", mask or "") else set()
        if mask in ("", "-1") or indices & set(range(len(counted))):
            hidden += [gpu for index, gpu in enumerate(counted) if mask == "-1" or index not in indices]
    return tuple(gpu for gpu in gpus if gpu not in hidden)


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment with a process's own on top. Where that holds a mask, it is the only one."""
    masked = any(name in own for name in ALL)
    return {**{name: value for name, value in os.environ.items() if not (masked and name in ALL)}, **own}
