"""What the GPUs are doing now: mode, memory, processes, errors, heat, power."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.machine import detect, nvidia
from launch.machine.gpu import GIB, Gpu
from launch.machine.kfd import GTT, NODES
from launch.machine.sysfs import folders, is_folder, number, properties, text

OCCUPIED = 0.10  # our choice: an idle driver keeps 0.3 GB, a desktop 1 of 24; more is another run
HELD = 100_000_000  # bytes; our choice. ROCr opens every GPU that it sees, also those a process does not use
NEAR_LIMIT_C = 10.0  # before the limit that the device states
CAPS = ("power1_cap", "power1_cap_default")
KFD_PROCESSES = "sys/class/kfd/kfd/proc"


def partition_mode(facts: Facts) -> Finding | None:
    compute, memory = facts.needs.compute_partition, facts.needs.memory_partition
    if compute is None or not facts.amd_gpus:
        return None
    expected = Expected(f"{compute}, {memory}", f"conf/hardware: host.compute_partition and memory_partition of {facts.group}")
    modes = sorted({(gpu.compute_partition or "unknown", gpu.memory_partition or "unknown") for gpu in facts.amd_gpus})
    read = "; ".join(", ".join(mode) for mode in modes)
    wrong = [mode for mode in modes if mode[0] not in (compute, "unknown")]
    if wrong:
        cure = f"stop what uses the GPUs, then sudo amd-smi set --gpu all --compute-partition {compute}"
        return expected.fail(read, f"{cure}; {_keep('compute', wrong[0][0])}")
    wrong = [mode for mode in modes if mode[1] not in (memory, "unknown")]
    if wrong:
        cure = f"stop what uses the GPUs, then (it restarts the driver) sudo amd-smi set --memory-partition {memory}"
        return expected.fail(read, f"{cure}; {_keep('memory', wrong[0][1])}")
    if modes != [(compute, memory)]:
        return expected.unknown(read, "amd-smi partition")
    return expected.passed(read)


def _keep(kind: str, mode: str) -> str:
    return f"to keep it: hardware.host.{kind}_partition={mode}, with hardware.memory_gb and hardware.compute_units of one device"


def memory_size(facts: Facts) -> Finding | None:
    if facts.hardware is None or not facts.gpus or facts.hardware.unified_memory:
        return None
    expected = Expected(f"{facts.hardware.memory_gb:g} GiB each", f"conf/hardware: memory_gb of {facts.group}")
    known = [gpu for gpu in facts.gpus if gpu.memory_gb is not None and facts.group in (gpu.group, gpu.partition_of)]
    if not known:
        return expected.unknown("the driver states no size", "amd-smi static --vram, or nvidia-smi")
    least = min(known, key=lambda gpu: gpu.memory_gb or 0)
    read = f"{(least.memory_gb or 0) / GIB:.0f} GiB each"
    if detect.is_smaller(least, facts.hardware):
        return expected.warn(read, f"nothing: plans of runs here count with it. Elsewhere: hardware.memory_gb={read.split()[0]}")
    return expected.passed(read)


def _memory(facts: Facts) -> dict[str, tuple[int, int]]:
    """Bytes used and in all of each PCI device that states both."""
    found = {gpu.pci_address or "": _amd_memory(facts, gpu) for gpu in facts.whole_gpus() if gpu.gfx.startswith("gfx")}
    others = [gpu.pci_address for gpu in facts.gpus if gpu.pci_address and not gpu.gfx.startswith("gfx")]
    asked = nvidia.memory(others) if others and facts.is_live else {}
    return {**{address: memory for address, memory in found.items() if memory}, **asked}


def _amd_memory(facts: Facts, gpu: Gpu) -> tuple[int, int] | None:
    """Of an integrated GPU: of what it may take of the system's."""
    pool = "gtt" if gpu.gfx in GTT else "vram"
    used, total = (number(facts.device(gpu) / f"mem_info_{pool}_{which}") for which in ("used", "total"))
    return (used, total) if used is not None and total else None


def _holders(facts: Facts) -> dict[int, dict[str, int]] | None:
    """Bytes that processes compute with on these GPUs, by process and PCI address; None where the kernel does not tell.

    It shows the processes of every container, by their numbers on the host. A desktop's memory is not among it.
    """
    if not facts.amd_gpus or not is_folder(facts.root / KFD_PROCESSES):
        return None
    ids = [(gpu.pci_address or "", number(facts.root / NODES / str(gpu.node) / "gpu_id")) for gpu in facts.amd_gpus]
    found = {}
    for folder in folders(facts.root / KFD_PROCESSES):
        held = dict.fromkeys((address for address, _ in ids), 0)
        for address, gpu_id in ids:  # partitions of a card share its address
            held[address] += number(folder / f"vram_{gpu_id}") or 0
        if max(held.values()) >= HELD and not (facts.is_live and int(folder.name) == os.getpid()):
            found[int(folder.name)] = held
    return found


def memory_occupied(facts: Facts) -> Finding | None:
    """By others. What a screen may take, and no computation holds, is a warning."""
    if not facts.gpus:
        return None
    expected = Expected(f"less than {OCCUPIED:.0%} used", "launch/checks/state.py: plans count on free GPUs")
    found = _memory(facts)
    if not found:
        return expected.unknown("the driver does not say", "amd-smi metric --mem-usage, or nvidia-smi")
    busy = {address: used / total for address, (used, total) in found.items() if used >= OCCUPIED * total}
    if not busy:
        return expected.passed(f"{len(found)} GPUs, at most {max(used / total for used, total in found.values()):.1%} used")
    holders = _holders(facts) or {}
    computed = {address: sum(held.get(address, 0) for held in holders.values()) for address in busy}
    drawing = {gpu.pci_address for gpu in facts.gpus if _draws(facts, gpu)}
    sure = any(address not in drawing or computed[address] >= OCCUPIED * found[address][1] for address in busy)
    words = [f"{address} {found[address][0] / 1e9:.1f} GB ({part:.0%})" for address, part in busy.items()]
    read = "; ".join(words[:4]) + (f"; and {len(words) - 4} more" if len(words) > 4 else "") + _named(facts, holders)
    others = facts.mask_without(list(busy))
    cure = "stop the processes that hold it (amd-smi process, or nvidia-smi)" + (f", or take the others: export {others}" if others else "")
    return expected.fail(read, cure) if sure else expected.warn(read, cure)


def _draws(facts: Facts, gpu: Gpu) -> bool:
    """It is integrated, or of the PCI class of what has a screen."""
    return gpu.gfx in GTT or (text(facts.device(gpu) / "class") or "").startswith("0x0300")


def _named(facts: Facts, pids: Iterable[int]) -> str:
    names = [f"{facts.file(f'proc/{pid}/comm') or 'not of this container'} ({pid})" for pid in pids]
    return f", by {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else ""


def foreign_processes(facts: Facts) -> Finding | None:
    if not facts.amd_gpus:
        return None
    expected = Expected(f"no other process holds {HELD / 1e9:g} GB of these GPUs", "kernel: /sys/class/kfd/kfd/proc")
    holders = _holders(facts)
    if holders is None:
        return expected.unknown(f"/{KFD_PROCESSES} is not there", "amd-smi process")
    if not holders:
        return expected.passed("none")
    mine = [
        pid for pid in holders if (facts.file(f"proc/{pid}/status") or "").partition("\nUid:\t")[2].split("\t")[0] == str(facts.host.uid)
    ]
    stop = f"; if it is yours and forgotten: kill {mine[0]}" if mine else ""
    return expected.warn(_named(facts, holders).removeprefix(", by "), f"wait for them, or take other GPUs{stop}")


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
    """Against the board's own default: that of a Radeon leaves out what its data sheet counts in (fans, memory)."""
    if not facts.amd_gpus:
        return None
    expected = Expected("the device's own default", "kernel: hwmon power1_cap_default of each GPU")
    caps = {gpu.pci_address: _caps_w(facts, gpu) for gpu in facts.whole_gpus()}
    known = {address: caps for address, caps in caps.items() if all(caps)}  # the second die of an MI250X has none of its own
    if not known:
        return expected.unknown("the driver states no cap, or no default", "amd-smi metric --power")
    low = [(f"{address} {cap:.0f} of {default:.0f} W", default) for address, (cap, default) in known.items() if cap < default]
    if not low:
        return expected.passed(f"{min(cap for cap, _ in known.values()):.0f} W or more")
    cure = f"sudo amd-smi set --gpu all --power-cap {low[0][1]:.0f}, unless somebody capped it on purpose"
    return expected.warn("; ".join(words for words, _ in low[:4]), cure)


def _caps_w(facts: Facts, gpu: Gpu) -> tuple[float, float]:
    """Now and by default; 0 for what is not stated."""
    cap, default = (next((n for folder in _sensors(facts, gpu) if (n := number(folder / name))), 0) for name in CAPS)
    return cap / 1e6, default / 1e6
