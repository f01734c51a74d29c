"""Check the current state of the GPUs: mode, memory, processes, errors, temperature and power."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import (
    Finding,
    boot_with,
    fail,
    fail_or_warn,
    first_few,
    judge,
    passed,
    unknown,
    warn,
)
from launch.machine import detect, nvidia
from launch.machine.gpu import GIB, Gpu
from launch.machine.kfd import INTEGRATED, NODES
from launch.machine.sysfs import folders, is_folder, number, properties, text, total_memory

# Share of the memory; our choice. An idle driver uses 0.3 GB, and a desktop 1 of 24 GB. A larger
# share belongs to another run.
OCCUPIED = 0.10
# Our choice. ROCr opens every visible GPU, so processes hold a little memory of unused GPUs, too.
HELD_GB = 0.1
# Degrees below the device's limit.
NEAR_LIMIT_C = 10.0
CAPS = ("power1_cap", "power1_cap_default")
KFD_PROCESSES = "sys/class/kfd/kfd/proc"
# The following four constants concern integrated GPUs, which use system memory (GTT).
PAGE = 4096  # bytes
LEFT_TO_SYSTEM = 4 << 30  # bytes; kyuz0's guides leave 4 GiB or more
LARGEST = 128 << 30  # bytes of the largest machine, assumed without /proc/meminfo
# Our choice, because AMD's examples set 96 of 128 GB. The kernel's default is half.
ENOUGH = 0.75
CARVED_GB = 1.0  # the BIOS offers 0.5 GB or more (AMD's documentation)


def partition_mode(facts: Facts) -> Finding | None:
    needed = facts.needs.compute_partition, facts.needs.memory_partition
    if needed[0] is None:
        return None
    both = ((gpu.compute_partition, gpu.memory_partition) for gpu in facts.amd_gpus)
    modes = sorted({(compute or "unknown", memory or "unknown") for compute, memory in both})
    reading = "; ".join(", ".join(mode) for mode in modes)
    actual_modes = zip(*modes, strict=True)
    for kind, mode, actual in zip(("compute", "memory"), needed, actual_modes, strict=True):
        if others := [other for other in actual if other not in (mode, "unknown")]:
            command = f"sudo amd-smi set --gpu all --{kind}-partition {mode}"
            keep = f"hardware.host.{kind}_partition={others[0]} hardware.memory_gb=<of one device> "
            keep += "hardware.compute_units=<of one device>"
            return fail(
                reading, f"stop the runs on these GPUs, then {command}; to use {others[0]}: {keep}"
            )
    if modes == [needed]:
        return passed(reading)
    return unknown(reading, "amd-smi partition")


def memory_size(facts: Facts) -> Finding | None:
    hardware = facts.hardware
    if hardware is None or hardware.unified_memory:
        return None
    gpus = [gpu for gpu in facts.gpus if gpu.memory_gb is not None and detect.is_of(gpu, hardware)]
    if not gpus:
        return unknown("the driver reports no size", "amd-smi static --vram, or nvidia-smi")
    smallest = min(gpus, key=lambda gpu: gpu.memory_gb or 0)
    gib = f"{(smallest.memory_gb or 0) / GIB:.0f}"
    remedy = f"do nothing here, where plans use it; on other machines: hardware.memory_gb={gib}"
    return judge(f"{gib} GiB each", not detect.is_smaller(smallest, hardware), remedy, "")


def _memory(facts: Facts) -> dict[str, tuple[int, int]]:
    """Return (used, total) bytes by PCI address, for the devices that report both."""
    memory, others = {}, []
    for gpu in facts.physical_gpus():
        address = gpu.pci_address or ""
        if not gpu.is_amd:
            others.append(address)
            continue
        # An integrated GPU uses system memory.
        pool = "gtt" if gpu.gfx in INTEGRATED else "vram"
        used, total = (
            number(facts.device(gpu) / f"mem_info_{pool}_{which}") for which in ("used", "total")
        )
        if used is not None and total:
            memory[address] = (used, total)
    return {**memory, **(nvidia.memory(others) if others and facts.is_live else {})}


def _compute_memory(facts: Facts) -> dict[int, dict[str, int]] | None:
    """Return the bytes that processes allocated for computing, by pid and PCI address.

    The pids are in the host's namespace, so processes of all containers are included. Memory of a
    desktop is not. Return None if the driver does not report processes.
    """
    if not facts.amd_gpus or not is_folder(facts.root / KFD_PROCESSES):
        return None
    ids = [
        (gpu.pci_address or "", number(facts.root / NODES / str(gpu.node) / "gpu_id"))
        for gpu in facts.amd_gpus
    ]
    holders = {}
    for folder in folders(facts.root / KFD_PROCESSES):
        sizes = dict.fromkeys((address for address, _ in ids), 0)
        for address, gpu_id in ids:  # partitions of a card share its address
            sizes[address] += number(folder / f"vram_{gpu_id}") or 0
        if max(sizes.values()) >= HELD_GB * 1e9 and not (
            facts.is_live and int(folder.name) == os.getpid()
        ):
            holders[int(folder.name)] = sizes
    return holders


def memory_occupied(facts: Facts) -> Finding | None:
    """Fail if computations occupy a GPU's memory; warn if it may be a desktop."""
    memory = _memory(facts)
    if not memory:
        return unknown(
            "the driver reports no memory use", "amd-smi metric --mem-usage, or nvidia-smi"
        )
    shares = {address: used / total for address, (used, total) in memory.items()}
    busy = [address for address, (used, total) in memory.items() if used >= OCCUPIED * total]
    if not busy:
        return passed(f"{len(memory)} GPUs, at most {max(shares.values()):.1%} used")
    holders = _compute_memory(facts) or {}
    computed = {
        address: sum(sizes.get(address, 0) for sizes in holders.values()) for address in busy
    }
    displays = {
        gpu.pci_address
        for gpu in facts.gpus
        if gpu.gfx in INTEGRATED or (text(facts.device(gpu) / "class") or "").startswith("0x0300")
    }
    reading = first_few([f"{a} {memory[a][0] / 1e9:.1f} GB ({shares[a]:.0%})" for a in busy])
    reading += f", by {_process_names(facts, holders)}" if holders else ""
    remedy = "stop the processes that occupy it (amd-smi process, or nvidia-smi)"
    if others := facts.mask_without(busy):
        remedy += f", or use other GPUs: export {others}"
    is_computing = any(a not in displays or computed[a] >= OCCUPIED * memory[a][1] for a in busy)
    return fail_or_warn(is_computing, reading, remedy)


def _process_names(facts: Facts, pids: Iterable[int]) -> str:
    unknown_name = "outside this container"
    return first_few([f"{facts.file(f'proc/{pid}/comm') or unknown_name} ({pid})" for pid in pids])


def foreign_processes(facts: Facts) -> Finding | None:
    holders = _compute_memory(facts)
    if holders is None:
        return unknown(f"/{KFD_PROCESSES} is missing", "amd-smi process")
    if not holders:
        return passed("none")
    remedy = "wait until they end, or use other GPUs"
    for pid in holders:
        status = facts.file(f"proc/{pid}/status") or ""
        if status.partition("\nUid:\t")[2].split("\t")[0] == str(facts.host.uid):
            remedy += f"; if you forgot to stop it: kill {pid}"
            break
    return warn(_process_names(facts, holders), remedy)


def ras(facts: Facts) -> Finding | None:
    """Check the error counters of every block since the driver was loaded."""
    kinds: set[str] = set()
    addresses: list[str] = []
    errors: list[str] = []
    has_counters = False
    for gpu in facts.physical_gpus():
        for file in sorted((facts.device(gpu) / "ras").glob("*_err_count")):
            counts = {name.rstrip(":"): value for name, value in properties(file).items()}
            has_counters = has_counters or bool(counts)
            for kind in filter(counts.get, ("ue", "ce")):
                kinds.add(kind)
                addresses.append(gpu.pci_address or "")
                block = file.name.removesuffix("_err_count")
                errors.append(f"{gpu.pci_address} {block} {kind} {counts[kind]}")
    if not has_counters:
        return unknown(
            "no counters: this GPU has no ECC, or the driver hides them", "amd-smi metric --ecc"
        )
    if not errors:
        return passed(f"none on {len(facts.physical_gpus())} GPUs")
    if "ue" in kinds:
        others = facts.mask_without(addresses)
        exclude = f"exclude this GPU: export {others}; then " if others else ""
        return fail(
            f"uncorrectable: {first_few(errors)}", f"{exclude}reboot; if errors return, replace it"
        )
    remedy = "watch it, because rising counts precede a failure: amd-smi metric --ecc"
    return warn(f"corrected: {first_few(errors)}", remedy)


def _sensors(facts: Facts, gpu: Gpu, pattern: str) -> list[Path]:
    folders = sorted((facts.device(gpu) / "hwmon").glob("hwmon*"))
    return [file for folder in folders for file in sorted(folder.glob(pattern))]


def temperature(facts: Facts) -> Finding | None:
    hot, temperatures, margin = [], [], NEAR_LIMIT_C
    for gpu in facts.physical_gpus():
        for sensor in _sensors(facts, gpu, "temp*_input"):
            stem = sensor.with_name(sensor.name.removesuffix("input"))
            now, limit = number(sensor), number(f"{stem}crit")
            if now is None:
                continue
            temperatures.append(now / 1000)
            if limit and (limit - now) / 1000 < NEAR_LIMIT_C:
                label = text(f"{stem}label") or sensor.name
                hot.append(f"{gpu.pci_address} {label} {now / 1000:.0f} of {limit / 1000:.0f} C")
                margin = min(margin, (limit - now) / 1000)
    if not temperatures:
        return unknown("no sensor was found", "amd-smi metric --temperature")
    if not hot:
        return passed(f"at most {max(temperatures):.0f} C")
    remedy = (
        "check fans, dust and inlet air, because a hot GPU throttles; or cap its power: "
        "sudo amd-smi set --power-cap <W>"
    )
    return fail_or_warn(margin <= 0, first_few(hot), remedy)


def power_cap(facts: Facts) -> Finding | None:
    """Compare the cap with the board's default. A Radeon's readings exclude fans and memory."""
    watts = {}
    for gpu in facts.physical_gpus():
        cap, default = (
            next(filter(None, map(number, _sensors(facts, gpu, name))), 0) / 1e6 for name in CAPS
        )
        if cap and default:  # the second die of an MI250X reports neither
            watts[gpu.pci_address] = (cap, default)
    if not watts:
        return unknown("the driver reports no cap or no default", "amd-smi metric --power")
    low = {address: caps for address, caps in watts.items() if caps[0] < caps[1]}
    if not low:
        return passed(f"{min(cap for cap, _ in watts.values()):.0f} W or more")
    words = [f"{address} {cap:.0f} of {default:.0f} W" for address, (cap, default) in low.items()]
    default = next(iter(low.values()))[1]
    remedy = f"sudo amd-smi set --gpu all --power-cap {default:.0f}, unless the cap is intended"
    return warn(first_few(words), remedy)


def gtt_size(facts: Facts) -> Finding:
    """Check how much system memory the GPU may use. Only warn: plans use the current size."""
    memory = total_memory(facts.root)
    available = max(0, (LARGEST if memory is None else memory) - LEFT_TO_SYSTEM)
    pages = available // PAGE
    remedy = boot_with(f"ttm.pages_limit={pages} ttm.page_pool_size={pages}")
    remedy += f". For kernels without ttm.pages_limit: amdgpu.gttsize={pages * PAGE >> 20}"
    size, command = _pool_gb(facts, "gtt")
    minimum_gb = ENOUGH * available / 1e9
    finding = judge(size and f"{size:.0f} GB", (size or 0) >= minimum_gb, remedy, command)
    return finding.expecting(f"{minimum_gb:.0f} GB or more for the GPU")


def carved_memory(facts: Facts) -> Finding:
    size, command = _pool_gb(facts, "vram")
    remedy = "set the UMA frame buffer in the BIOS to 512 MB, the smallest size"
    return judge(size and f"{size:.1f} GB", (size or 0) <= CARVED_GB, remedy, command)


def _pool_gb(facts: Facts, pool: str) -> tuple[float | None, str]:
    """Return the size of a pool of the integrated GPU, and the command that shows it."""
    assert facts.integrated is not None
    file = f"mem_info_{pool}_total"
    size = number(facts.device(facts.integrated) / file)
    command = f"cat /sys/bus/pci/devices/{facts.integrated.pci_address}/{file}"
    return None if size is None else size / 1e9, command
