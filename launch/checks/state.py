"""What the GPUs are doing now: mode, memory, processes, errors, heat, power."""

from __future__ import annotations

import os
from pathlib import Path

from launch import nvidia
from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.gpu import Gpu
from launch.kfd import GTT
from launch.sysfs import folders, number, properties, text

FITS = 0.97  # of the file's figure: it is nominal, and firmware keeps a little
OCCUPIED_WARN, OCCUPIED_FAIL = 0.03, 0.10  # our choice: an idle driver keeps 0.3 GB, a desktop 1 of 24; more is another run
NEAR_LIMIT_C = 10.0  # before the limit that the device states
POWER_CAP = 0.95  # of the file's power_w
KFD_PROCESSES = "sys/class/kfd/kfd/proc"


def partition_mode(facts: Facts) -> Finding | None:
    compute, memory = facts.needs.compute_partition, facts.needs.memory_partition
    if compute is None or not facts.amd_gpus:
        return None
    expected = Expected(f"{compute}, {memory}", f"conf/hardware: host.compute_partition and memory_partition of {facts.group}")
    modes = sorted({(gpu.compute_partition or "unknown", gpu.memory_partition or "unknown") for gpu in facts.amd_gpus})
    read = "; ".join(", ".join(mode) for mode in modes)
    if any(mode[0] not in (compute, "unknown") for mode in modes):
        cure = f"stop what uses the GPUs, then sudo amd-smi set --gpu all --compute-partition {compute}"
        return expected.fail(read, f"{cure}; {_keep('compute', modes[0][0])}")
    if any(mode[1] not in (memory, "unknown") for mode in modes):
        cure = f"stop what uses the GPUs, then (it restarts the driver) sudo amd-smi set --memory-partition {memory}"
        return expected.fail(read, f"{cure}; {_keep('memory', modes[0][1])}")
    if modes != [(compute, memory)]:
        return expected.unknown(read, "amd-smi partition")
    return expected.passed(read)


def _keep(kind: str, mode: str) -> str:
    return f"to keep it: hardware.host.{kind}_partition={mode}, with hardware.memory_gb and hardware.compute_units of one device"


def memory_size(facts: Facts) -> Finding | None:
    if facts.hardware is None or not facts.gpus or facts.hardware.unified_memory:
        return None
    wanted = facts.hardware.memory_gb
    expected = Expected(f"{wanted:g} GB each", f"conf/hardware: memory_gb of {facts.group}")
    of_group = [gpu for gpu in facts.gpus if facts.group in (gpu.group, gpu.partition_of)]  # not an integrated one beside it
    sizes = [gpu.memory_gb for gpu in of_group or facts.gpus if gpu.memory_gb is not None]
    if not sizes:
        return expected.unknown("the driver states no size", "amd-smi static --vram, or nvidia-smi")
    least = min(sizes)
    if least >= FITS * wanted:
        return expected.passed(f"{least:.0f} GB each")
    return expected.fail(
        f"{least:.1f} GB: plans would count on memory that is not there", f"hardware.memory_gb={least:.0f} on the command line"
    )


def _memory(facts: Facts) -> dict[str, tuple[int, int]]:
    """Bytes used and in all of each PCI device that states both."""
    if facts.is_live and not facts.amd_gpus:
        return nvidia.memory([gpu.pci_address for gpu in facts.gpus if gpu.pci_address])
    found = {gpu.pci_address: _amd_memory(facts, gpu) for gpu in facts.whole_gpus()}
    return {address: memory for address, memory in found.items() if address and memory}


def _amd_memory(facts: Facts, gpu: Gpu) -> tuple[int, int] | None:
    """Of an integrated GPU: of what it may take of the system's."""
    pool = "gtt" if gpu.gfx in GTT else "vram"
    used, total = (number(facts.device(gpu) / f"mem_info_{pool}_{which}") for which in ("used", "total"))
    return (used, total) if used is not None and total else None


def memory_occupied(facts: Facts) -> Finding | None:
    if not facts.gpus:
        return None
    expected = Expected(
        f"less than {OCCUPIED_WARN:.0%} used (fails from {OCCUPIED_FAIL:.0%})", "launch/checks/state.py: plans count on free GPUs"
    )
    found = _memory(facts)
    if not found:
        return expected.unknown("the driver does not say", "amd-smi metric --mem-usage, or nvidia-smi")
    parts = {address: used / total for address, (used, total) in found.items()}
    busy = [f"{address} {found[address][0] / 1e9:.1f} GB ({part:.0%})" for address, part in parts.items() if part >= OCCUPIED_WARN]
    if not busy:
        return expected.passed(f"{len(found)} GPUs, at most {max(parts.values()):.1%} used")
    others = facts.mask_without([address for address, part in parts.items() if part >= OCCUPIED_WARN])
    cure = "stop the processes that hold it (amd-smi process, or nvidia-smi)" + (f", or take the others: export {others}" if others else "")
    read = "; ".join(busy[:4]) + (f"; and {len(busy) - 4} more" if len(busy) > 4 else "")
    return expected.fail(read, cure) if max(parts.values()) >= OCCUPIED_FAIL else expected.warn(read, cure)


def foreign_processes(facts: Facts) -> Finding | None:
    if not facts.amd_gpus:
        return None
    expected = Expected("no process but yours", "kernel: /sys/class/kfd/kfd/proc")
    if not (facts.root / KFD_PROCESSES).is_dir():
        return expected.unknown(f"/{KFD_PROCESSES} is not there", "amd-smi process")
    pids = [int(folder.name) for folder in folders(facts.root / KFD_PROCESSES)]
    others = [pid for pid in pids if not facts.is_live or pid != os.getpid()]
    if not others:
        return expected.passed("none")
    words = [f"{facts.file(f'proc/{pid}/comm') or 'not of this container'} ({pid})" for pid in others]
    read = ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")
    return expected.warn(read, f"wait for them, or, if they are yours and forgotten: kill {others[0]}")


def ras(facts: Facts) -> Finding | None:
    """Errors since the driver was loaded, of memory and every other block that counts them."""
    if not facts.amd_gpus:
        return None
    expected = Expected("no uncorrectable and no correctable error", "kernel: ras/*_err_count of each GPU (amdgpu RAS)")
    totals = {"ue": 0, "ce": 0}
    where, read_any = [], False
    for gpu in facts.whole_gpus():
        for file in sorted((facts.device(gpu) / "ras").glob("*_err_count")):
            counts = {name.rstrip(":"): value for name, value in properties(file).items()}
            read_any = read_any or bool(counts)
            hit = {name: counts[name] for name in totals if counts.get(name)}
            totals = {name: totals[name] + hit.get(name, 0) for name in totals}
            where += [f"{gpu.pci_address} {file.name.removesuffix('_err_count')} {name} {count}" for name, count in hit.items()]
    if not read_any:
        return expected.unknown("no counters: this GPU has no ECC, or the driver hides them", "amd-smi metric --ecc")
    if not where:
        return expected.passed(f"none on {len(facts.whole_gpus())} GPUs")
    read = "; ".join(where[:4])
    if totals["ue"]:
        others = facts.mask_without([line.split()[0] for line in where])
        leave_out = f"leave this GPU out: export {others}; then " if others else ""
        return expected.fail(f"uncorrectable: {read}", f"{leave_out}reboot; if it counts again, replace it")
    return expected.warn(f"corrected: {read}", "watch it: amd-smi metric --ecc. Rising counts come before a failure")


def _sensors(facts: Facts, gpu: Gpu) -> list[Path]:
    return sorted((facts.device(gpu) / "hwmon").glob("hwmon*"))


def temperature(facts: Facts) -> Finding | None:
    if not facts.amd_gpus:
        return None
    expected = Expected(f"{NEAR_LIMIT_C:g} degrees below the device's own limit", "kernel: hwmon temp*_crit of each GPU")
    hot, highest, worst = [], None, NEAR_LIMIT_C
    for gpu in facts.whole_gpus():
        for sensor in (file for folder in _sensors(facts, gpu) for file in sorted(folder.glob("temp*_input"))):
            stem = sensor.with_name(sensor.name.removesuffix("input"))
            now, limit = number(sensor), number(f"{stem}crit")
            if now is None:
                continue
            highest = max(highest or 0.0, now / 1000)
            if limit and (limit - now) / 1000 < NEAR_LIMIT_C:
                hot.append(f"{gpu.pci_address} {text(f'{stem}label') or sensor.name} {now / 1000:.0f} of {limit / 1000:.0f} C")
                worst = min(worst, (limit - now) / 1000)
    if highest is None:
        return expected.unknown("no sensor", "amd-smi metric --temperature")
    if not hot:
        return expected.passed(f"at most {highest:.0f} C")
    cure = "it slows down to save itself: look at fans, dust and inlet air; power can be capped: sudo amd-smi set --power-cap <W>"
    return expected.fail("; ".join(hot[:4]), cure) if worst <= 0 else expected.warn("; ".join(hot[:4]), cure)


def power_cap(facts: Facts) -> Finding | None:
    if facts.hardware is None or facts.hardware.power_w is None or not facts.amd_gpus:
        return None
    wanted = facts.hardware.power_w
    expected = Expected(f"{wanted:g} W", f"conf/hardware: power_w of {facts.group}")
    caps = {gpu.pci_address: _cap_w(facts, gpu) for gpu in facts.whole_gpus()}
    known = {address: cap for address, cap in caps.items() if cap}  # the second die of an MI250X has none of its own
    if not known:
        return expected.unknown("the driver states no cap", "amd-smi metric --power")
    low = [f"{address} {cap:.0f} W" for address, cap in known.items() if cap < POWER_CAP * wanted]
    if not low:
        return expected.passed(f"{min(known.values()):.0f} W or more")
    return expected.warn("; ".join(low[:4]), f"sudo amd-smi set --power-cap {wanted:g}, unless somebody capped it on purpose")


def _cap_w(facts: Facts, gpu: Gpu) -> float | None:
    found = [number(folder / "power1_cap") for folder in _sensors(facts, gpu)]
    return next((cap / 1e6 for cap in found if cap), None)
