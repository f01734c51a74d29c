"""Check how much system memory (GTT) an integrated GPU may use."""

from __future__ import annotations

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding, boot_with
from launch.machine.gpu import Gpu
from launch.machine.kfd import GTT
from launch.machine.sysfs import number, total_memory

PAGE = 4096
LEFT_TO_SYSTEM = 4 << 30  # bytes; kyuz0's guides leave 4 GiB or more
ALL = 128 << 30  # bytes of the largest machine, if there is no /proc/meminfo
# Our choice. The default is half; AMD's own examples set 96 of 128 GB, so that much is deliberate.
ENOUGH = 0.75
CARVED_GB = 1.0  # the smallest that the BIOS offers is 0.5 GB (AMD's documentation)


def _integrated(facts: Facts) -> Gpu | None:
    return next((gpu for gpu in facts.amd_gpus if gpu.gfx in GTT), None)


def gtt_size(facts: Facts) -> Finding | None:
    """Warn only, because plans of runs here use the size that is set."""
    gpu = _integrated(facts)
    if gpu is None:
        return None
    memory = total_memory(facts.root)
    most = max(0, (ALL if memory is None else memory) - LEFT_TO_SYSTEM)
    expected = Expected(
        f"{ENOUGH * most / 1e9:.0f} GB or more for the GPU",
        "kyuz0's guides: all but 4 GiB; the kernel itself gives half",
    )
    pages = most // PAGE
    cure = boot_with(f"ttm.pages_limit={pages} ttm.page_pool_size={pages}")
    cure += f". Kernels that do not know ttm.pages_limit: amdgpu.gttsize={pages * PAGE >> 20}"
    size = number(facts.device(gpu) / "mem_info_gtt_total")
    if size is None:
        return _unread(expected, gpu, "mem_info_gtt_total")
    return expected.pass_or_warn(size >= ENOUGH * most, f"{size / 1e9:.0f} GB", cure)


def carved_memory(facts: Facts) -> Finding | None:
    gpu = _integrated(facts)
    if gpu is None:
        return None
    expected = Expected(
        f"{CARVED_GB:g} GB or less set aside by the BIOS",
        "AMD's ROCm documentation for Ryzen AI Max: the smallest, 0.5 GB",
    )
    size = number(facts.device(gpu) / "mem_info_vram_total")
    if size is None:
        return _unread(expected, gpu, "mem_info_vram_total")
    cure = "in the BIOS, UMA frame buffer: 512 MB, the smallest"
    return expected.pass_or_warn(size / 1e9 <= CARVED_GB, f"{size / 1e9:.1f} GB", cure)


def _unread(expected: Expected, gpu: Gpu, file: str) -> Finding:
    look = f"cat /sys/bus/pci/devices/{gpu.pci_address}/{file}"
    return expected.unknown(f"{file} cannot be read", look)
