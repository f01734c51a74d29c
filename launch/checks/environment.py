"""Variables of the shell that break a run, and the integrated GPU that a mask has to leave out."""

from __future__ import annotations

import re

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.environment import ALLOCATOR, is_expandable
from launch.machine import masks
from launch.machine.kfd import GTT
from launch.machine.products import products

SMALL = 16  # compute units: what integrated GPUs beside a card have at most (Radeon 890M)
HIP = masks.AMD[0]


def integrated_gpu(facts: Facts) -> Finding | None:
    gpus = tuple(gpu for gpu in facts.host.gpus if gpu.gfx.startswith("gfx"))  # as HIP counts
    small = [i for i, gpu in enumerate(gpus) if not (gpu.group or gpu.partition_of) and 0 < (gpu.compute_units or 0) <= SMALL]
    others = [i for i, gpu in enumerate(gpus) if i not in small and gpu.gfx not in GTT]
    if not facts.amd_gpus or not others:
        return None
    expected = Expected("none among the GPUs that a run sees", "Radeon owners: `invalid image` or a segfault with an iGPU beside the card")
    if not small:
        return expected.passed("none beside the card")
    named = f"{gpus[small[0]].gfx}, {gpus[small[0]].compute_units} CUs"
    left_out = gpus[small[0]] not in masks.visible(gpus, facts.host.environ)
    if left_out or (facts.only is not None and not facts.only & set(small)):  # a run sets the mask itself
        return expected.passed(f"{named}, which is left out")
    read, cure = f"index {small[0]} is one ({named})", f"export {HIP}={','.join(map(str, others))}, or switch it off in the BIOS"
    return expected.fail(read, cure) if small[0] < others[0] else expected.warn(read, cure)  # runs take the first ones


def gfx_override(facts: Facts) -> Finding | None:
    expected = Expected(
        "HSA_OVERRIDE_GFX_VERSION unset", "notes of gfx1151 and gfx906 owners: a foreign target faults where native code exists"
    )
    if not facts.is_amd:
        return None
    found = facts.host.environ.get("HSA_OVERRIDE_GFX_VERSION")
    if found is None:
        return expected.passed("unset")
    targets = {gpu.gfx for gpu in facts.amd_gpus} or ({facts.hardware.gfx} if facts.hardware else set())
    native = targets & {product.gfx for product in products()}
    cure = "unset HSA_OVERRIDE_GFX_VERSION"
    if native and not all(_version(target) == found for target in native):
        return expected.fail(f"{found}, and {', '.join(sorted(native))} has kernels of its own", cure)
    return expected.warn(f"{found}: holds for every GPU of a process", f"{cure}, unless no image has code for your GPU")


def _version(target: str) -> str:
    """As the variable spells it: gfx90a is 9.0.10. Its own changes nothing, on this GPU."""
    return f"{target[3:-2]}.{int(target[-2], 16)}.{int(target[-1], 16)}"


def visibility_masks(facts: Facts) -> Finding | None:
    if not facts.gpus and not facts.is_amd:
        return None
    expected = Expected("one mask at most, with indices that exist", "vLLM platforms/rocm.py; pytorch/pytorch#140398; ROCm: GPU isolation")
    environ, names = facts.host.environ, masks.AMD if facts.is_amd else masks.NVIDIA
    read = ", ".join(f"{name}={environ[name]}" for name in masks.ALL if name in environ) or "none set"
    if facts.is_amd and masks.ROCR in environ:
        given = environ[masks.ROCR]
        kept = f"export {HIP}={given}" if re.fullmatch(r"[\d,]+", given) else f"choose GPUs by {HIP}"
        return expected.fail(read, f"unset {masks.ROCR}; {kept}")
    found = masks.given(names, environ)
    if len(set(found.values())) > 1:
        return expected.fail(read, f"unset {list(found)[1]}: which of the two is meant, nobody can tell")
    mask = next(iter(found.values()), "")
    indices = [part.strip() for part in mask.split(",")] if mask else []
    if not all(index.isdecimal() for index in indices) or len(set(indices)) < len(indices):
        return expected.fail(f"{read}: indices are needed, each once", f"export {names[0]}=0")
    count = len([gpu for gpu in facts.host.gpus if gpu.gfx.startswith("gfx") == facts.is_amd])
    beyond = [index for index in indices if int(index) >= count]
    if beyond and count:
        return expected.fail(f"{read}: this machine has {count} GPUs, from 0", f"export {names[0]}=0")
    return expected.passed(read)


def allocator(facts: Facts) -> Finding | None:
    if not facts.is_amd:
        return None
    expected = Expected("no expandable_segments, and one name", "pytorch/pytorch#192259 (hang), #195202 (NaN in bf16); vLLM's sleep mode")
    given = {name: facts.host.environ[name] for name in ALLOCATOR if name in facts.host.environ}
    read = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    expandable = [name for name, value in given.items() if is_expandable(value)]
    if expandable:
        return expected.warn(read, f"unset {' '.join(expandable)}")
    if len(given) > 1:
        return expected.warn(read, f"unset {' '.join(list(given)[1:])}: which of several wins differs between torch and vLLM")
    return expected.passed(read)
