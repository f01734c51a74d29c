"""Check the variables of the shell, the integrated GPU, and the Python of runs without an image."""

from __future__ import annotations

import re
import sys

from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, fail_or_warn, judge, passed, warn
from launch.machine import masks, this_python
from launch.machine.kfd import INTEGRATED
from launch.machine.products import products
from launch.schema.variables import ALLOCATOR, is_expandable

MAX_INTEGRATED = 16  # compute units of an integrated GPU next to a card (Radeon 890M)
HIP = masks.AMD[0]
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def integrated_gpu(facts: Facts) -> Finding | None:
    gpus = tuple(gpu for gpu in facts.host.gpus if gpu.is_amd)  # as HIP counts them
    integrated = [
        i
        for i, gpu in enumerate(gpus)
        if (gpu.gfx in INTEGRATED or not (gpu.group or gpu.partition_of))
        and 0 < (gpu.compute_units or 0) <= MAX_INTEGRATED
    ]
    others = [i for i, gpu in enumerate(gpus) if i not in integrated and gpu.gfx not in INTEGRATED]
    if not others:
        return None
    if not integrated:
        return passed("no integrated GPU next to the card")
    gpu = gpus[integrated[0]]
    description = f"{gpu.gfx}, {gpu.compute_units} CUs"
    is_used = facts.only is None or facts.only & set(integrated)  # a run sets a mask
    if not is_used or gpu not in masks.visible(gpus, facts.host.environ):
        return passed(f"the integrated GPU is excluded ({description})")
    mask = ",".join(map(str, others))
    remedy = f"export {HIP}={mask}, or disable the integrated GPU in the BIOS"
    # Without a mask, runs take the first GPUs.
    return fail_or_warn(
        integrated[0] < others[0], f"GPU {integrated[0]} is integrated ({description})", remedy
    )


def gfx_override(facts: Facts) -> Finding | None:
    value = facts.host.environ.get(OVERRIDE)
    if value is None:
        return passed("unset")
    targets = {gpu.gfx for gpu in facts.amd_gpus}
    if not targets and facts.hardware:
        targets = {facts.hardware.gfx}
    native = sorted(targets & {product.gfx for product in products()})
    # The variable spells gfx90a as 9.0.10. Setting it to the GPU's real version has no effect.
    versions = {f"{t[3:-2]}.{int(t[-2], 16)}.{int(t[-1], 16)}" for t in native}
    if native and versions != {value}:
        reading = f"{value}, but {', '.join(native)} has native kernels"
        return fail(reading, f"unset {OVERRIDE}")
    remedy = f"unset {OVERRIDE}, unless no image has code for your GPU"
    return warn(f"{value} applies to every GPU of a process", remedy)


def visibility_masks(facts: Facts) -> Finding | None:
    if not facts.gpus and not facts.is_amd:
        return None
    environ, names = facts.host.environ, masks.AMD if facts.is_amd else masks.NVIDIA
    reading = _settings({name: environ[name] for name in masks.ALL if name in environ})
    if facts.is_amd and masks.ROCR in environ:
        rocr = environ[masks.ROCR]
        setting = (
            f"export {HIP}={rocr}" if re.fullmatch(r"[\d,]+", rocr) else f"choose GPUs with {HIP}"
        )
        return fail(reading, f"unset {masks.ROCR}; {setting}")
    variables = masks.active(names, environ)
    if len(set(variables.values())) > 1:
        remedy = f"unset {list(variables)[1]}, because the two contradict each other"
        return fail(reading, remedy)
    mask = next(iter(variables.values()), "")
    indices = [part.strip() for part in mask.split(",")] if mask else []
    remedy = f"export {names[0]}=0"
    count = len([gpu for gpu in facts.host.gpus if gpu.is_amd == facts.is_amd])
    if not all(index.isdecimal() for index in indices) or len(set(indices)) < len(indices):
        return fail(f"{reading}: only indices are allowed, each once", remedy)
    if count and any(int(index) >= count for index in indices):
        return fail(f"{reading}: this machine has {count} GPU(s), counted from 0", remedy)
    return passed(reading)


def allocator(facts: Facts) -> Finding | None:
    variables = {name: facts.host.environ[name] for name in ALLOCATOR if name in facts.host.environ}
    reading = _settings(variables)
    if expandable := [name for name, value in variables.items() if is_expandable(value)]:
        return warn(reading, f"unset {' '.join(expandable)}")
    others = " ".join(list(variables)[1:])
    remedy = f"unset {others}, because torch and vLLM disagree on which one applies"
    return judge(reading, len(variables) < 2, remedy, "")


def _settings(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "not set"


def torch_build(facts: Facts) -> Finding:
    assert facts.hardware is not None
    assert facts.probe.packages is not None
    found, needed = facts.probe.packages(), this_python.GPUS[facts.hardware.vendor]
    reading = f"torch {found.torch}, built for {found.torch_build}"
    if found.torch_build == needed:
        return passed(reading)
    remedy = this_python.TORCH_REMEDY.format(needed)
    return fail(reading if found.torch else f"{sys.executable} has no torch", remedy)


def vllm(facts: Facts) -> Finding:
    assert facts.probe.packages is not None
    version = facts.probe.packages().vllm
    if version:
        return passed(f"vLLM {version}")
    is_needed = False
    if facts.run:
        from launch.plan.local_python import needs_vllm  # takes 0.2 s with the planner

        is_needed = needs_vllm(facts.run)
    return fail_or_warn(is_needed, f"{sys.executable} has no vLLM", this_python.VLLM_REMEDY)
