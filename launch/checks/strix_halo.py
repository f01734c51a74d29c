"""Memory of an integrated GPU: what it may take of the system's (GTT) is its capacity, not the small part that the BIOS sets aside."""

from __future__ import annotations

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding, boot_with
from launch.machine.gpu import Gpu
from launch.machine.kfd import GTT
from launch.machine.sysfs import number, total_memory

PAGE = 4096
LEFT_TO_SYSTEM = 4 << 30  # bytes; kyuz0's guides leave 4 GiB and more
ALL = 128 << 30  # bytes of the largest machine, where /proc/meminfo is not there
ENOUGH = 0.75  # our choice: 96 of 128 GB, which AMD's own examples set, is on purpose; half is the default
CARVED_GB = 1.0  # AMD's documentation: the smallest that the BIOS offers, 0.5 GB


def _integrated(facts: Facts) -> Gpu | None:
    return next((gpu for gpu in facts.amd_gpus if gpu.gfx in GTT), None)


def gtt_size(facts: Facts) -> Finding | None:
    """A warning: plans of runs here count with what there is."""
    gpu = _integrated(facts)
    if gpu is None:
        return None
    total = total_memory(facts.root)
    most = max(0, (ALL if total is None else total) - LEFT_TO_SYSTEM)
    expected = Expected(f"{ENOUGH * most / 1e9:.0f} GB or more for the GPU", "kyuz0's guides: all but 4 GiB; the kernel itself gives half")
    found = number(facts.device(gpu) / "mem_info_gtt_total")
    if found is None:
        return expected.unknown("mem_info_gtt_total cannot be read", f"cat /sys/bus/pci/devices/{gpu.pci_address}/mem_info_gtt_total")
    if found >= ENOUGH * most:
        return expected.passed(f"{found / 1e9:.0f} GB")
    pages = most // PAGE
    cure = boot_with(f"ttm.pages_limit={pages} ttm.page_pool_size={pages}")
    return expected.warn(f"{found / 1e9:.0f} GB", f"{cure}. Kernels that do not know ttm.pages_limit: amdgpu.gttsize={pages * PAGE >> 20}")


def carved_memory(facts: Facts) -> Finding | None:
    gpu = _integrated(facts)
    if gpu is None:
        return None
    expected = Expected(
        f"{CARVED_GB:g} GB or less set aside by the BIOS", "AMD's ROCm documentation for Ryzen AI Max: the smallest, 0.5 GB"
    )
    found = number(facts.device(gpu) / "mem_info_vram_total")
    if found is None:
        return expected.unknown("mem_info_vram_total cannot be read", f"cat /sys/bus/pci/devices/{gpu.pci_address}/mem_info_vram_total")
    read = f"{found / 1e9:.1f} GB"
    return expected.passed(read) if found / 1e9 <= CARVED_GB else expected.warn(read, "in the BIOS, UMA frame buffer: 512 MB, the smallest")
