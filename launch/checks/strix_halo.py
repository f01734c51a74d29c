"""Memory of an integrated GPU: what it may take of the system's (GTT) is its capacity, not the small part that the BIOS sets aside."""

from __future__ import annotations

import re

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.gpu import Gpu
from launch.kfd import GTT
from launch.sysfs import number

PAGE = 4096
LEFT_TO_SYSTEM = 4 << 30  # bytes; kyuz0's guides leave 4 GiB and more
CARVED_GB = 1.0  # AMD's documentation: the smallest that the BIOS offers, 0.5 GB


def _integrated(facts: Facts) -> Gpu | None:
    return next((gpu for gpu in facts.amd_gpus if gpu.gfx in GTT), None)


def gtt_size(facts: Facts) -> Finding | None:
    gpu = _integrated(facts)
    if gpu is None or facts.hardware is None:
        return None
    wanted = facts.hardware.memory_gb
    expected = Expected(f"{wanted:g} GB for the GPU", f"conf/hardware: memory_gb of {facts.group}; the kernel gives half of the memory")
    found = number(facts.device(gpu) / "mem_info_gtt_total")
    if found is None:
        return expected.unknown("mem_info_gtt_total cannot be read", f"cat /sys/bus/pci/devices/{gpu.pci_address}/mem_info_gtt_total")
    if found / 1e9 >= wanted:
        return expected.passed(f"{found / 1e9:.0f} GB")
    grub = f"add {_parameters(facts)} to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub, reboot"
    return expected.fail(f"{found / 1e9:.0f} GB", f"{grub}; or plan with less: hardware.memory_gb={found / 1e9:.0f}")


def _parameters(facts: Facts) -> str:
    """For all of this machine's memory but what the system needs; for 128 GB where /proc/meminfo is not there."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", facts.file("proc/meminfo") or "", re.MULTILINE)
    available = int(total.group(1)) * 1024 if total else 128 << 30
    pages = max(0, available - LEFT_TO_SYSTEM) // PAGE
    return f"ttm.pages_limit={pages} ttm.page_pool_size={pages} (older kernels: amdgpu.gttsize={pages * PAGE >> 20})"


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
