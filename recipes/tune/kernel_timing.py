"""Time Triton kernels of a user's file on the GPU that is present.

Every argument needs a value (args= of recipes.tune.occupancy): a number its value, a pointer its
number of elements. Tensors contain normal random numbers, or zeros if they are integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from recipes.tune.kernels import Launch

PORTABLE = ("num_warps", "num_stages")  # options that Triton has on every GPU


def present_arch() -> str | None:
    """Return the architecture of the first AMD GPU, such as gfx942, or None."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]


def can_time(launch: Launch) -> bool:
    """Return whether the grid and the value of every argument are known."""
    numbers = {name for name, kind in launch.signature.items() if kind != "constexpr"}
    return launch.grid is not None and numbers <= set(launch.values)


def arguments(launch: Launch, device: str) -> dict[str, Any]:
    from recipes.tune.kernels import POINTEES

    dtypes = {f"*{name}": dtype for dtype, name in POINTEES.items()}
    named = {}
    for name, kind in launch.signature.items():
        value = launch.constants.get(name) if kind == "constexpr" else launch.values[name]
        if kind in dtypes:
            value = torch.zeros(int(value), dtype=dtypes[kind], device=device)
            if value.is_floating_point():
                value.normal_()
        named[name] = value
    return named


def run(launch: Launch, named: dict[str, Any]) -> None:
    keys = launch.options if torch.version.hip else set(launch.options) & set(PORTABLE)
    options = {key: launch.options[key] for key in keys}
    launch.function[launch.grid](**named, **options)


def time_us(launch: Launch) -> float:
    """Return the median time of a kernel on the current GPU in microseconds."""
    from triton.testing import do_bench

    named = arguments(launch, "cuda")
    return 1e3 * float(do_bench(lambda: run(launch, named), return_mode="median"))


def measure(tasks: Sequence[tuple[Launch, str]], arch: str | None) -> dict[int, float]:
    """Return the times of the tasks for this GPU, in microseconds by index.

    A kernel that fails may break the GPU's context, so it ends the measurement.
    """
    times = {}
    for index, (launch, task_arch) in enumerate(tasks):
        if task_arch == arch and can_time(launch):
            try:
                times[index] = time_us(launch)
            except Exception as error:  # Triton and HIP raise many types
                print(f"not timed: {launch.name} {launch.blocks}: {str(error)[-400:]}")
                break
    return times
