"""Check for shell variables that break a run, and for an integrated GPU that must be left out."""

from __future__ import annotations

import re

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.machine import masks
from launch.machine.kfd import GTT
from launch.machine.products import products
from launch.schema.variables import ALLOCATOR, is_expandable

SMALL = 16  # compute units: the most that integrated GPUs next to a card have (Radeon 890M)
HIP = masks.AMD[0]


def integrated_gpu(facts: Facts) -> Finding | None:
    gpus = tuple(gpu for gpu in facts.host.gpus if gpu.gfx.startswith("gfx"))  # as HIP counts them
    small = [
        i
        for i, gpu in enumerate(gpus)
        if not (gpu.group or gpu.partition_of) and 0 < (gpu.compute_units or 0) <= SMALL
    ]
    others = [i for i, gpu in enumerate(gpus) if i not in small and gpu.gfx not in GTT]
    if not facts.amd_gpus or not others:
        return None
    expected = Expected(
        "none among the GPUs that a run sees",
        "Radeon owners: `invalid image` or a segfault with an iGPU next to the card",
    )
    if not small:
        return expected.passed("none next to the card")
    gpu = gpus[small[0]]
    named = f"{gpu.gfx}, {gpu.compute_units} CUs"
    used = facts.only is None or facts.only & set(small)  # a run sets the mask itself
    if not used or gpu not in masks.visible(gpus, facts.host.environ):
        return expected.passed(f"{named}, which is left out")
    mask = ",".join(map(str, others))
    cure = f"export {HIP}={mask}, or switch it off in the BIOS"
    # Without a mask, runs take the first GPUs.
    return expected.fail_or_warn(small[0] < others[0], f"index {small[0]} is one ({named})", cure)


def gfx_override(facts: Facts) -> Finding | None:
    name = "HSA_OVERRIDE_GFX_VERSION"
    if not facts.is_amd:
        return None
    expected = Expected(
        f"{name} unset",
        "notes of gfx1151 and gfx906 owners: a foreign target faults where native code exists",
    )
    value = facts.host.environ.get(name)
    if value is None:
        return expected.passed("unset")
    targets = {gpu.gfx for gpu in facts.amd_gpus}
    if not targets and facts.hardware:
        targets = {facts.hardware.gfx}
    native = sorted(targets & {product.gfx for product in products()})
    # As the variable spells it, gfx90a is 9.0.10. Setting a GPU's own version has no effect.
    spelled = {f"{t[3:-2]}.{int(t[-2], 16)}.{int(t[-1], 16)}" for t in native}
    if native and spelled != {value}:
        read = f"{value}, and {', '.join(native)} has kernels of its own"
        return expected.fail(read, f"unset {name}")
    cure = f"unset {name}, unless no image has code for your GPU"
    return expected.warn(f"{value}: applies to every GPU of a process", cure)


def visibility_masks(facts: Facts) -> Finding | None:
    if not facts.gpus and not facts.is_amd:
        return None
    expected = Expected(
        "one mask at most, with indices that exist",
        "vLLM platforms/rocm.py; pytorch/pytorch#140398; ROCm: GPU isolation",
    )
    environ, names = facts.host.environ, masks.AMD if facts.is_amd else masks.NVIDIA
    read = _settings({name: environ[name] for name in masks.ALL if name in environ})
    if facts.is_amd and masks.ROCR in environ:
        rocr = environ[masks.ROCR]
        choose = (
            f"export {HIP}={rocr}" if re.fullmatch(r"[\d,]+", rocr) else f"choose GPUs by {HIP}"
        )
        return expected.fail(read, f"unset {masks.ROCR}; {choose}")
    variables = masks.in_force(names, environ)
    if len(set(variables.values())) > 1:
        cure = f"unset {list(variables)[1]}: the two contradict each other"
        return expected.fail(read, cure)
    mask = next(iter(variables.values()), "")
    indices = [part.strip() for part in mask.split(",")] if mask else []
    fault = None
    count = len([gpu for gpu in facts.host.gpus if gpu.gfx.startswith("gfx") == facts.is_amd])
    if not all(index.isdecimal() for index in indices) or len(set(indices)) < len(indices):
        fault = "indices are needed, each once"
    elif count and any(int(index) >= count for index in indices):
        fault = f"this machine has {count} GPUs, from 0"
    if fault:
        return expected.fail(f"{read}: {fault}", f"export {names[0]}=0")
    return expected.passed(read)


def allocator(facts: Facts) -> Finding | None:
    if not facts.is_amd:
        return None
    expected = Expected(
        "no expandable_segments, and one name",
        "pytorch/pytorch#192259 (hang), #195202 (NaN in bf16); vLLM's sleep mode",
    )
    variables = {name: facts.host.environ[name] for name in ALLOCATOR if name in facts.host.environ}
    read = _settings(variables)
    if expandable := [name for name, value in variables.items() if is_expandable(value)]:
        return expected.warn(read, f"unset {' '.join(expandable)}")
    others = " ".join(list(variables)[1:])
    cure = f"unset {others}: torch and vLLM give different ones priority"
    return expected.pass_or_warn(len(variables) < 2, read, cure)


def _settings(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "none set"
