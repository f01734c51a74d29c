"""Variables of the shell that break a run, and the integrated GPU that a mask has to leave out."""

from __future__ import annotations

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.kfd import GTT, PRODUCTS

SMALL = 16  # compute units: what integrated GPUs beside a card have at most (Radeon 890M)
OWN = {"gfx906": "9.0.6"}  # its own version: ROCm 7.2.1 images need it, ours have to do without (containers/images.lock.yaml)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ROCR, HIP, CUDA, ORDINAL = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"


def integrated_gpu(facts: Facts) -> Finding | None:
    gpus = facts.host.gpus
    small = [i for i, gpu in enumerate(gpus) if not (gpu.group or gpu.partition_of) and 0 < (gpu.compute_units or 0) <= SMALL]
    others = [i for i, gpu in enumerate(gpus) if i not in small and gpu.gfx not in GTT]
    if not facts.amd_gpus or not others:
        return None
    expected = Expected("none among the GPUs that a run sees", "Radeon owners: `invalid image` or a segfault with an iGPU beside the card")
    if not small:
        return expected.passed("none beside the card")
    mask = facts.host.environ.get(HIP)
    named = f"{gpus[small[0]].gfx}, {gpus[small[0]].compute_units} CUs"
    left_out = mask is not None and not {str(i) for i in small} & {part.strip() for part in mask.split(",")}
    if left_out or (facts.only is not None and not facts.only & set(small)):  # a run sets the mask itself
        return expected.passed(f"{named}, which is left out")
    return expected.fail(f"index {small[0]} is one ({named})", f"export {HIP}={','.join(map(str, others))}, or switch it off in the BIOS")


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
    native = targets & {product.gfx for product in PRODUCTS}
    cure = "unset HSA_OVERRIDE_GFX_VERSION"
    if native and not all(OWN.get(target) == found for target in native):
        return expected.fail(f"{found}, and {', '.join(sorted(native))} has kernels of its own", cure)
    return expected.warn(f"{found}: holds for every GPU of a process", f"{cure}, unless no image has code for your GPU")


def visibility_masks(facts: Facts) -> Finding | None:
    if not facts.gpus and not facts.is_amd:
        return None
    expected = Expected("one mask at most, with indices that exist", "vLLM platforms/rocm.py; pytorch/pytorch#140398; ROCm: GPU isolation")
    environ = facts.host.environ
    given = {name: environ[name] for name in (ROCR, HIP, CUDA, ORDINAL) if name in environ}
    read = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    if facts.is_amd and ROCR in given:
        return expected.fail(read, f"unset {ROCR}; choose GPUs by {HIP}")
    if facts.is_amd and HIP in given and given.get(CUDA, given[HIP]) != given[HIP]:
        return expected.fail(read, f"unset {CUDA}: vLLM refuses two masks that differ")
    mask = given.get(HIP if facts.is_amd else CUDA, "")
    beyond = [part for part in mask.split(",") if part.strip().isdecimal() and int(part) >= len(facts.host.gpus)]
    if beyond and facts.host.gpus:
        return expected.fail(f"{read}: this machine has {len(facts.host.gpus)} GPUs, from 0", f"export {HIP if facts.is_amd else CUDA}=0")
    if facts.is_amd and (ORDINAL in given or CUDA in given):
        name = ORDINAL if ORDINAL in given else CUDA
        return expected.warn(read, f"unset {name}; choose GPUs by {HIP}, the mask that plans narrow")
    return expected.passed(read)


def allocator(facts: Facts) -> Finding | None:
    if not facts.is_amd:
        return None
    expected = Expected("no expandable_segments, and one name", "pytorch/pytorch#192259 (hang), #195202 (NaN in bf16); vLLM's sleep mode")
    given = {name: facts.host.environ[name] for name in ALLOCATOR if name in facts.host.environ}
    read = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    expandable = [name for name, value in given.items() if "expandable_segments:true" in value.lower().replace(" ", "")]
    if expandable:
        return expected.warn(read, f"unset {' '.join(expandable)}")
    if len(given) > 1:
        return expected.warn(read, f"unset {' '.join(list(given)[1:])}: which of several wins differs between torch and vLLM")
    return expected.passed(read)
