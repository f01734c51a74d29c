"""Check for shell variables that break a run, and for an integrated GPU that must be left out."""

from __future__ import annotations

import re

from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, fail_or_warn, judge, passed, warn
from launch.machine import masks
from launch.machine.kfd import INTEGRATED
from launch.machine.products import products
from launch.schema.variables import ALLOCATOR, is_expandable

SMALL = 16  # compute units: the most that integrated GPUs next to a card have (Radeon 890M)
HIP = masks.AMD[0]
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def integrated_gpu(facts: Facts) -> Finding | None:
    gpus = tuple(gpu for gpu in facts.host.gpus if gpu.gfx.startswith("gfx"))  # as HIP counts them
    small = [
        i
        for i, gpu in enumerate(gpus)
        if not (gpu.group or gpu.partition_of) and 0 < (gpu.compute_units or 0) <= SMALL
    ]
    others = [i for i, gpu in enumerate(gpus) if i not in small and gpu.gfx not in INTEGRATED]
    if not others:
        return None
    if not small:
        return passed("none next to the card")
    gpu = gpus[small[0]]
    description = f"{gpu.gfx}, {gpu.compute_units} CUs"
    used = facts.only is None or facts.only & set(small)  # a run sets the mask itself
    if not used or gpu not in masks.visible(gpus, facts.host.environ):
        return passed(f"{description}, which is left out")
    mask = ",".join(map(str, others))
    cure = f"export {HIP}={mask}, or switch it off in the BIOS"
    # Without a mask, runs take the first GPUs.
    return fail_or_warn(small[0] < others[0], f"index {small[0]} is one ({description})", cure)


def gfx_override(facts: Facts) -> Finding | None:
    value = facts.host.environ.get(OVERRIDE)
    if value is None:
        return passed("unset")
    targets = {gpu.gfx for gpu in facts.amd_gpus}
    if not targets and facts.hardware:
        targets = {facts.hardware.gfx}
    native = sorted(targets & {product.gfx for product in products()})
    # As the variable spells it, gfx90a is 9.0.10. Setting a GPU's own version has no effect.
    spelled = {f"{t[3:-2]}.{int(t[-2], 16)}.{int(t[-1], 16)}" for t in native}
    if native and spelled != {value}:
        read = f"{value}, and {', '.join(native)} has native kernels"
        return fail(read, f"unset {OVERRIDE}")
    cure = f"unset {OVERRIDE}, unless no image has code for your GPU"
    return warn(f"{value}: applies to every GPU of a process", cure)


def visibility_masks(facts: Facts) -> Finding | None:
    if not facts.gpus and not facts.is_amd:
        return None
    environ, names = facts.host.environ, masks.AMD if facts.is_amd else masks.NVIDIA
    read = _settings({name: environ[name] for name in masks.ALL if name in environ})
    if facts.is_amd and masks.ROCR in environ:
        rocr = environ[masks.ROCR]
        choose = (
            f"export {HIP}={rocr}" if re.fullmatch(r"[\d,]+", rocr) else f"choose GPUs by {HIP}"
        )
        return fail(read, f"unset {masks.ROCR}; {choose}")
    variables = masks.active(names, environ)
    if len(set(variables.values())) > 1:
        cure = f"unset {list(variables)[1]}: the two contradict each other"
        return fail(read, cure)
    mask = next(iter(variables.values()), "")
    indices = [part.strip() for part in mask.split(",")] if mask else []
    fault = None
    count = len([gpu for gpu in facts.host.gpus if gpu.gfx.startswith("gfx") == facts.is_amd])
    if not all(index.isdecimal() for index in indices) or len(set(indices)) < len(indices):
        fault = "indices are needed, each once"
    elif count and any(int(index) >= count for index in indices):
        fault = f"this machine has {count} GPUs, from 0"
    if fault:
        return fail(f"{read}: {fault}", f"export {names[0]}=0")
    return passed(read)


def allocator(facts: Facts) -> Finding | None:
    variables = {name: facts.host.environ[name] for name in ALLOCATOR if name in facts.host.environ}
    read = _settings(variables)
    if expandable := [name for name, value in variables.items() if is_expandable(value)]:
        return warn(read, f"unset {' '.join(expandable)}")
    others = " ".join(list(variables)[1:])
    cure = f"unset {others}: torch and vLLM give different ones priority"
    return judge(read, len(variables) < 2, cure, "")


def _settings(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "none set"
