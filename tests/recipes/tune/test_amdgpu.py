"""Test recipes/tune/amdgpu.py: occupancy calculated from LLVM's limits, and assembly."""

from __future__ import annotations

import pytest

from recipes.tune import layer_kernels
from recipes.tune.amdgpu import (
    ARCHITECTURES,
    Resources,
    count_instructions,
    occupancy,
    read_resources,
    sgpr_waves,
    vgpr_waves,
)


def needs(
    vgprs: int = 1, *, waves: int = 1, sgprs: int = 1, lds: int = 0, wave_size: int = 64
) -> Resources:
    return Resources(vgprs, 0, sgprs, 0, 0, 0, lds, waves * wave_size, wave_size)


# ---- Occupancy


# Registers -> waves per SIMD.
VGPRS = {
    # 512 registers in granules of 8, at most 8 waves. 65 is rounded up to 72 (512 / 72 = 7.1), 84
    # to 88 (5.8), 129 to 136 (3.8), and 170, the example of AMD's guide, to 176 (2.9).
    "gfx942": {1: 8, 64: 8, 65: 7, 84: 5, 128: 4, 129: 3, 170: 2, 256: 2, 257: 1, 512: 1},
    "gfx90a": {97: 4},  # 104 (4.9)
    "gfx950": {97: 4},
    # 256 in granules of 4, at most 10 waves. 24 (10.7); 25 is rounded up to 28 (9.1).
    "gfx908": {24: 10, 25: 9, 63: 4, 256: 1},
    # 1536 in granules of 24, at most 16 waves. 97 is rounded up to 120 (12.8), 121 to 144 (10.7).
    "gfx1100": {96: 16, 97: 12},
    "gfx1151": {120: 12, 121: 10},
    "gfx1201": {168: 9, 256: 5},
}
# 800 in granules of 16 up to gfx9. From gfx10 on, every wave has 106 registers.
SGPRS = {
    "gfx942": {96: 8, 97: 7},
    "gfx90a": {112: 7},
    "gfx908": {80: 10, 81: 8},
    "gfx1100": {106: 16},
}


def test_waves_by_registers() -> None:
    for table, waves_of in ((VGPRS, vgpr_waves), (SGPRS, sgpr_waves)):
        for arch, expected in table.items():
            waves = {number: waves_of(ARCHITECTURES[arch], number) for number in expected}
            assert waves == expected, arch


@pytest.mark.parametrize(("arch", "kernel", "workgroups", "waves", "limits"), [
    # 66 registers allow 7 waves per SIMD, so floor(7 * 4 / 8) = 3 workgroups of 8 waves fit. They
    # are 3 * 8 / 4 = 6 waves per SIMD.
    ("gfx942", needs(66, waves=8), 3, 6, ("VGPR",)),
    ("gfx942", needs(97, waves=16), 1, 4, ("VGPR",)),  # floor(4 * 4 / 16) = 1 workgroup
    # LDS allows 65536 / 32768 = 2 workgroups of 4 waves. 202 registers (rounded up to 208) allow 2
    # waves per SIMD, which are 2 * 4 / 4 = 2 workgroups too.
    ("gfx942", needs(202, waves=4, lds=32768), 2, 2, ("VGPR", "LDS")),
    # A third of 64 KiB takes 43 blocks of 512 bytes, which fit twice. The guide's 65536 / 21845
    # would be 3.
    ("gfx942", needs(64, waves=4, lds=21845), 2, 2, ("LDS",)),
    ("gfx942", needs(64, waves=4, lds=21504), 3, 3, ("LDS",)),  # 42 blocks
    # 160 KiB in blocks of 1280 bytes: 42 blocks fit three times, 43 blocks twice.
    ("gfx950", needs(64, waves=4, lds=53760), 3, 3, ("LDS",)),
    ("gfx950", needs(64, waves=4, lds=53761), 2, 2, ("LDS",)),
    ("gfx942", needs(64, waves=8, lds=131072), 0, 0, ("LDS",)),  # more than 64 KiB
    ("gfx942", needs(24, waves=8, sgprs=104), 3, 6, ("SGPR",)),  # 800 / 112 = 7: floor(7 * 4 / 8)
    ("gfx942", needs(24, waves=8, lds=32), 4, 8, ()),  # 8 * 4 / 8 = 4: all slots are used
    # There are slots for 10 * 4 / 2 = 20 workgroups of two waves, but only 16 barriers.
    ("gfx908", needs(24, waves=2), 16, 8, ()),
    ("gfx908", needs(24, waves=1), 40, 10, ()),  # one wave needs no barrier
    # Two compute units have 4 SIMDs of 16 waves and 128 KiB, of which a workgroup may use 64.
    ("gfx1100", needs(107, waves=8, lds=8192, wave_size=32), 6, 12, ("VGPR",)),  # 12 * 4 / 8
    ("gfx1201", needs(24, waves=4, lds=65537, wave_size=32), 0, 0, ("LDS",)),
    ("gfx1201", needs(24, waves=32, wave_size=32), 2, 16, ()),
])  # fmt: skip
def test_occupancy(
    arch: str, kernel: Resources, workgroups: int, waves: float, limits: tuple[str, ...]
) -> None:
    fit = occupancy(ARCHITECTURES[arch], kernel)
    assert (fit.workgroups, fit.waves, fit.limits) == (workgroups, waves, limits)


def test_limits_of_single_resources() -> None:
    fit = occupancy(ARCHITECTURES["gfx942"], needs(66, waves=8, sgprs=104, lds=16384))
    # VGPR and SGPR: floor(7 * 4 / 8) = 3. LDS: 65536 / 16384 = 4. Slots: 32 / 8 = 4. Times 8 / 4.
    assert (fit.by_vgpr, fit.by_sgpr, fit.by_lds, fit.by_slots) == (6, 6, 8, 8)
    assert (fit.limits, fit.max_waves) == (("VGPR", "SGPR"), 8)


def test_every_gpu_with_triton_is_listed() -> None:
    gpus = map(layer_kernels.read_hardware, layer_kernels.HARDWARE.glob("*.yaml"))
    amd = [gpu for gpu in gpus if gpu.get("vendor") == "amd" and gpu.get("gfx")]
    assert {gpu["gfx"] for gpu in amd if gpu.get("triton", True)} == set(ARCHITECTURES)


# ---- Assembly

METADATA = """
amdhsa.kernels:
  - .agpr_count:     12
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
    .group_segment_fixed_size: 256
    .max_flat_workgroup_size: 512
    .name:           a_kernel
    .private_segment_fixed_size: 88
    .sgpr_count:     38
    .sgpr_spill_count: 3
    .vgpr_count:     140
    .vgpr_spill_count: 28
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx90a
"""


def assembly(metadata: str, text: str = "") -> str:
    return (
        f"a_kernel:\n{text}\ts_endpgm\n"
        f"\t.amdgpu_metadata\n---{metadata}...\n\n\t.end_amdgpu_metadata\n"
    )


def test_metadata_is_read() -> None:
    resources = read_resources(assembly(METADATA), dynamic_lds_bytes=65536)
    assert resources == Resources(140, 12, 38, 28, 3, 88, 256 + 65536, 512, 64)
    assert (resources.waves, resources.spills) == (8, 31)
    rdna = METADATA.replace("  - .agpr_count:     12\n    .args", "  - .args")
    assert read_resources(assembly(rdna)).agprs == 0
    for isa in ("s_endpgm", assembly("\namdhsa.kernels: []\n")):
        with pytest.raises(ValueError, match="expected 1"):
            read_resources(isa)


@pytest.mark.parametrize(("isa", "waits"), [
    ("\ts_waitcnt vmcnt(0) lgkmcnt(1)\n\ts_waitcnt lgkmcnt(0)\n",
     {"vmcnt(0)": 1, "lgkmcnt(n)": 1, "lgkmcnt(0)": 1}),
    ("\ts_waitcnt_vscnt null, 0x0 ; all stores\n", {"vscnt(0)": 1}),
    ("\ts_wait_loadcnt_dscnt 0x103\n\ts_wait_dscnt 0x0\n",
     {"loadcnt_dscnt(n)": 1, "dscnt(0)": 1}),
    ("\ts_wait_alu depctr_va_sdst(0)\n\ts_waitcnt_depctr 0xfff\n", {}),
])  # fmt: skip
def test_waits_for_memory_are_counted(isa: str, waits: dict[str, int]) -> None:
    assert count_instructions(isa).waits == waits
