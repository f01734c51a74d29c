"""List the resources of AMD's compute units, and derive occupancy from a kernel's assembly.

The numbers come from LLVM: llvm/lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp (each field below names
the function) and the feature lists in AMDGPU.td. The formula comes from AMD's workload optimization
guide ("Compute the occupancy of a kernel"), which describes registers and LDS on the MI300X. Scalar
registers and barriers limit occupancy in the same way. Scratch memory can be a limit too, but LLVM
does not know its size.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields, replace

import yaml


@dataclass(frozen=True)
class Architecture:
    """The unit that runs a workgroup: a compute unit on CDNA, a workgroup processor on RDNA.

    A workgroup processor consists of two compute units. RDNA's figures are for waves of 32 lanes,
    which Triton uses. Registers are counted per lane.
    """

    wave_size: int  # lanes
    simds: int  # getEUsPerCU: 4 on CDNA, 2 x 2 on RDNA
    max_waves: int  # per SIMD, getMaxWavesPerEU
    vgprs: int  # per SIMD, getTotalNumVGPRs; on gfx90a and later, VGPRs plus AGPRs
    vgpr_granule: int  # getVGPRAllocGranule
    # per SIMD, getTotalNumSGPRs; 0 if every wave has a full set (isSGPROccupancyLimited)
    sgprs: int
    sgpr_granule: int  # getSGPRAllocGranule
    lds_bytes: int  # getLocalMemorySize
    lds_granule: int  # bytes, getLdsDwGranularity
    lds_max_bytes: int  # per workgroup, FeatureAddressableLocalMemorySize
    barriers: int  # limit of workgroups that have more than one wave, getMaxWorkGroupsPerCU


_CDNA = Architecture(64, 4, 8, 512, 8, 800, 16, 64 << 10, 512, 64 << 10, 16)
# 1536 registers in granules of 24 (Feature1_5xVGPRs). RDNA 2 and small RDNA 3.5 chips have fewer.
_RDNA = Architecture(32, 4, 16, 1536, 24, 0, 0, 128 << 10, 512, 64 << 10, 32)
_RDNA_1024 = replace(_RDNA, vgprs=1024, vgpr_granule=16)
ARCHITECTURES = {
    # AGPRs are a second register file of 256, and getTotalNumVGPRs counts only one of the two.
    "gfx908": replace(_CDNA, vgprs=256, vgpr_granule=4, max_waves=10),
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": replace(_CDNA, lds_bytes=160 << 10, lds_granule=1280, lds_max_bytes=160 << 10),
    "gfx1030": _RDNA_1024,
    "gfx1100": _RDNA,
    "gfx1101": _RDNA,
    "gfx1150": _RDNA_1024,
    "gfx1151": _RDNA,
    "gfx1200": _RDNA,
    "gfx1201": _RDNA,
}

MAX_THREADS = 1024  # per workgroup, getMaxFlatWorkGroupSize
ENOUGH_WORKGROUPS = 1024  # a smaller grid leaves parts of an MI300X idle (AMD's workload guide)


@dataclass(frozen=True)
class Resources:
    """A kernel's needs according to its code object. Registers are counted per lane."""

    vgprs: int  # allocated; on gfx90a and later, including AGPRs
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int  # per lane
    lds_bytes: int  # per workgroup
    threads: int  # per workgroup
    wave_size: int  # lanes

    @property
    def waves(self) -> int:
        """Return the number of waves in a workgroup."""
        return -(-self.threads // self.wave_size)

    @property
    def spills(self) -> int:
        return self.vgpr_spills + self.sgpr_spills


@dataclass(frozen=True)
class Occupancy:
    """Waves per SIMD, averaged over the SIMDs that share a workgroup's LDS.

    Each `by_*` is the number of waves if only that resource limited it. Only complete workgroups
    fit. A workgroup of w waves on s SIMDs adds w / s, and 0 means that no workgroup fits.
    """

    by_vgpr: float
    by_sgpr: float
    by_lds: float
    by_slots: float  # limits on waves and barriers
    waves: float
    workgroups: int  # workgroups that share one LDS at the same time
    limits: tuple[str, ...]  # resources of the kernel that limit the occupancy
    max_waves: int


def _granules(number: int, granule: int) -> int:
    return -(-number // granule) * granule


def _waves(architecture: Architecture, total: int, granule: int, number: int) -> int:
    return min(total // _granules(max(number, 1), granule), architecture.max_waves)


def vgpr_waves(architecture: Architecture, vgprs: int) -> int:
    """Return waves per SIMD for this many VGPRs per lane (getNumWavesPerEUWithNumVGPRs)."""
    return _waves(architecture, architecture.vgprs, architecture.vgpr_granule, vgprs)


def sgpr_waves(architecture: Architecture, sgprs: int) -> int:
    """Return waves per SIMD for this many SGPRs.

    LLVM's older table has 8 waves instead of 7 for 97 to 100 registers.
    """
    if not architecture.sgprs:
        return architecture.max_waves
    return _waves(architecture, architecture.sgprs, architecture.sgpr_granule, sgprs)


def occupancy(architecture: Architecture, needs: Resources) -> Occupancy:
    """Return the occupancy of a kernel that needs these resources.

    AMD's formula for 4 SIMDs and workgroups of nW waves is min(floor(occ_vgpr * 4 / nW), occ_lds) *
    nW / 4. SGPRs and barriers are added to the minimum in the same way. LDS is rounded up to
    allocated blocks, unlike in the guide, which divides 65536 by the bytes.
    """
    waves, simds = needs.waves, architecture.simds
    slots = architecture.max_waves * simds // waves
    lds = slots
    if needs.lds_bytes:
        lds = architecture.lds_bytes // _granules(needs.lds_bytes, architecture.lds_granule)
    fits = {
        "VGPR": vgpr_waves(architecture, needs.vgprs) * simds // waves,
        "SGPR": sgpr_waves(architecture, needs.sgprs) * simds // waves,
        "LDS": lds if needs.lds_bytes <= architecture.lds_max_bytes else 0,
        "slots": min(slots, architecture.barriers) if waves > 1 else slots,
    }
    workgroups = min(fits.values())
    limits: tuple[str, ...] = ()
    if workgroups < fits["slots"]:
        limits = tuple(name for name, fit in fits.items() if fit == workgroups and name != "slots")
    by = [min(fit, slots) * waves / simds for fit in fits.values()]
    return Occupancy(*by, workgroups * waves / simds, workgroups, limits, architecture.max_waves)


# ---- Assembly

_METADATA = re.compile(r"\.amdgpu_metadata\n(.*?)\n\s*\.end_amdgpu_metadata", re.DOTALL)


def read_resources(isa: str, dynamic_lds_bytes: int = 0) -> Resources:
    """Return a kernel's needs from the metadata in its assembly.

    The metadata does not include Triton's dynamic LDS, so that is a parameter. Raise ValueError
    unless the text contains the metadata of exactly one kernel.
    """
    metadata = _METADATA.search(isa)
    content = yaml.safe_load(metadata[1]) if metadata else {}
    (kernel,) = content.get("amdhsa.kernels", [])
    return Resources(
        vgprs=kernel[".vgpr_count"],
        agprs=kernel.get(".agpr_count", 0),  # missing on RDNA, which has no AGPRs
        sgprs=kernel[".sgpr_count"],
        vgpr_spills=kernel[".vgpr_spill_count"],
        sgpr_spills=kernel[".sgpr_spill_count"],
        scratch_bytes=kernel[".private_segment_fixed_size"],
        lds_bytes=kernel[".group_segment_fixed_size"] + dynamic_lds_bytes,
        threads=kernel[".max_flat_workgroup_size"],
        wave_size=kernel[".wavefront_size"],
    )


@dataclass(frozen=True)
class Instructions:
    """Counts of instructions in a kernel's assembly, no matter how often each one runs.

    Memory accesses are counted by width per lane, such as b128 for 16 bytes.
    """

    global_loads: dict[str, int]
    global_stores: dict[str, int]
    lds_loads: dict[str, int]
    lds_stores: dict[str, int]
    matrix: dict[str, int]  # by mnemonic, such as v_mfma_... and v_wmma_...
    # by counter: vmcnt(0) waits for every access to vector memory, vmcnt(n) lets some continue
    waits: dict[str, int]


# Exclude instructions that LLVM marks as spills by a comment. Up to gfx90a, spills use the same
# buffer instructions as accesses to global memory.
_INSTRUCTION = re.compile(r"^\s+([a-z]\w*)(?!.*Folded (?:Spill|Reload))", re.MULTILINE)
_GLOBAL = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_|tr_|d16_hi_|d16_)?(\w+)")
_LDS = re.compile(
    r"ds_(read|load|write|store)_?(2|2addr|2st64|2addr_stride64)?_(?:tr_|addtid_)?([bui]\d+)\w*"
)
# s_waitcnt vmcnt(0) lgkmcnt(1); from gfx10 on s_waitcnt_vscnt null, 0x0; gfx12: s_wait_dscnt 0x0
_WAIT = re.compile(r"^\s+s_wait(?:cnt)?_?(\w*cnt)? +(?:null, *)?([^;\n]+)", re.MULTILINE)
_MATRIX = re.compile(r"v_(?:mfma|smfmac|wmma|swmmac)_\w+")
# Width in bits by the suffix of instructions up to gfx9. Later suffixes contain the width.
_BITS = {
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
    **dict.fromkeys(("byte", "ubyte", "sbyte"), 8),
    **dict.fromkeys(("short", "ushort", "sshort"), 16),
}


def count_instructions(isa: str) -> Instructions:
    """Count memory instructions by width per lane, matrix instructions by mnemonic, and waits."""
    counts = {field.name: Counter[str]() for field in fields(Instructions)}
    for mnemonic in _INSTRUCTION.findall(isa):
        name = re.sub(r"_e(32|64)$", "", mnemonic)
        if match := _GLOBAL.fullmatch(name):
            counts[f"global_{match[1]}s"][_width(match[2])] += 1
        elif match := _LDS.fullmatch(name):
            kind = "lds_loads" if match[1] in ("read", "load") else "lds_stores"
            counts[kind][("2x" if match[2] else "") + _width(match[3])] += 1
        elif _MATRIX.fullmatch(name):
            counts["matrix"][name] += 1
    for name, operands in _WAIT.findall(isa):
        pairs = re.findall(r"(\w+cnt)\((\d+)\)", operands) if not name else [(name, operands)]
        for counter, number in pairs:
            counts["waits"][f"{counter}({'0' if int(number, 0) == 0 else 'n'})"] += 1
    return Instructions(**{kind: dict(numbers) for kind, numbers in counts.items()})


def _width(suffix: str) -> str:
    """Return the width of an instruction's suffix, such as b128 for dwordx4 and b16 for ushort.

    If the suffix has no width (format loads), return the suffix.
    """
    name = suffix.split("_")[0]
    match = re.fullmatch(r"[bui](\d+)", name)
    bits = match[1] if match else _BITS.get(name)
    return f"b{bits}" if bits else suffix
