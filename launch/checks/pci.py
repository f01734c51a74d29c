"""Check how GPUs reach memory and each other: IOMMU, ACS, PCIe, xGMI."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Finding, boot_with, fail, first_few, passed, unknown, warn
from launch.machine.gpu import Gpu
from launch.machine.kfd import INTEGRATED
from launch.machine.sysfs import as_decimal, number, text
from launch.schema.enums import Link as LinkKind

BRIDGE = "0x0604"  # PCI class of bridges
PUBLIC = 64  # bytes of a device's configuration that any user may read
HEADER = 256  # bytes before the extended capabilities; a plain PCI bridge has no more
# ID of the extended capability. The low five bits of its control register, at offset 6, redirect
# peer traffic.
ACS = 0x000D
ACS_BITS = 0b11111
SMALL_HIVES = (1, 2, 4)  # GPUs of a hive in a virtual machine or on one xGMI bridge
PASSTHROUGH = "iommu=pt"  # also for Intel's IOMMU


def iommu(facts: Facts) -> Finding | None:
    """Check whether the IOMMU translates peer copies.

    A virtual machine does not show the IOMMU of its host.
    """
    if len(facts.amd_gpus) < (facts.needs.iommu_pt_from or 0):
        return None
    words = (facts.file("proc/cmdline") or "").split()
    types = (text(facts.device(gpu) / "iommu_group/type") for gpu in facts.physical_gpus())
    modes = set(filter(None, types))
    if PASSTHROUGH in words or modes == {"identity"}:
        return passed("the IOMMU does not translate (passthrough)")
    if modes:
        return fail(f"the IOMMU translates (mode {min(modes)})", boot_with(PASSTHROUGH))
    if any((facts.root / "sys/class/iommu").glob("*")) or not words:
        command = "cat /sys/bus/pci/devices/*/iommu_group/type"
        return unknown("the GPUs' iommu_group/type cannot be read", command)
    return passed("the IOMMU is off")


def acs(facts: Facts) -> Finding | None:
    """Check that no bridge's access control (ACS) sends peer copies through the root complex."""
    hives = {gpu.hive for gpu in facts.gpus}
    all_xgmi = len(hives) == 1 and None not in hives
    has_network = any((facts.root / "sys/class/infiniband").glob("*"))
    if len(facts.gpus) < 2 or (all_xgmi and not has_network):  # no peer copy passes a bridge
        return None
    devices = (facts.root / "sys/bus/pci/devices").glob("*")
    bridges = sorted(path for path in devices if (text(path / "class") or "").startswith(BRIDGE))
    if not bridges:
        return unknown(
            "no PCIe bridge is visible (a virtual machine or a copied tree)",
            "sudo lspci -vvv | grep -i acsctl",
        )
    control = {bridge.name: _acs_control(bridge / "config") for bridge in bridges}
    if on := [name for name, bits in control.items() if bits]:
        return warn(
            f"on at {len(on)} of {len(bridges)} bridges: {', '.join(on[:4])}",
            f"sudo setpci -s {on[0]} ECAP_ACS+0x6.w=0000, and the same for the others; or "
            "disable ACS in the BIOS",
        )
    if None in control.values():
        return unknown(
            "only root may read it", "sudo lspci -vvv | grep -i acsctl; `SrcValid+` means on"
        )
    return passed(f"off at {len(bridges)} bridges")


def _acs_control(config: Path) -> int | None:
    """Return a bridge's ACS control bits; 0 without ACS, None if only root may read them."""
    try:
        data = config.read_bytes()
    except OSError:
        return None
    if len(data) <= PUBLIC:
        return None
    offset, visited = HEADER, set()
    while offset >= HEADER and offset + 8 <= len(data) and offset not in visited:
        visited.add(offset)
        head = int.from_bytes(data[offset : offset + 4], "little")
        if head & 0xFFFF == ACS:
            return int.from_bytes(data[offset + 6 : offset + 8], "little") & ACS_BITS
        offset = head >> 20
    return 0


def pcie(facts: Facts) -> Finding | None:
    """Compare every link from a GPU to the root port with the capability of both ends.

    Many cards contain a switch, so the GPU's link stays on the board. The slot's link is the
    one above that switch.
    """
    gpus = [gpu for gpu in facts.physical_gpus() if gpu.gfx not in INTEGRATED]  # not integrated
    if not gpus:
        return None
    problems = defaultdict[str, list[str]](list)
    words = set()
    for gpu in gpus:
        device, address = facts.device(gpu), gpu.pci_address
        # Display cards slow their link down when idle; accelerators do not.
        is_display = (text(device / "class") or "").startswith("0x03")
        is_idle = is_display and not number(device / "gpu_busy_percent")
        links = _links_up(device)
        if not links:
            problems["unknown"].append(address or "")
        for width, widest, speed, fastest in links:
            words.add(f"x{width} at {speed:g} GT/s")
            if width < widest:
                problems["narrow"].append(f"{address} x{width} of x{widest}")
            if speed < fastest:
                kind = "idle" if is_idle else "slow"
                problems[kind].append(f"{address} {speed:g} of {fastest:g} GT/s")
    if narrow := problems["narrow"]:
        remedy = "power off, reseat the card and its riser in a slot of full width; sudo lspci -vv"
        return fail(first_few(narrow), remedy)
    if slow := problems["slow"]:
        remedy = "set the PCIe speed in the BIOS to auto; reseat the card and its riser"
        return warn(first_few(slow), f"{remedy}; sudo lspci -vv")
    if idle := problems["idle"]:
        remedy = "check again during a run, because idle cards slow their link"
        return unknown(f"{first_few(idle)}, idle", remedy)
    if addresses := problems["unknown"]:
        reading = f"no link speed reported for {len(addresses)} of {len(gpus)} GPUs"
        return unknown(reading, f"sudo lspci -vv -s {addresses[0]} | grep LnkSta")
    return passed(f"{len(gpus)} GPUs: {', '.join(sorted(words))}")


def _links_up(device: Path) -> list[tuple[int, int, float, float]]:
    """Return (width, largest width, GT/s, largest GT/s) of each link up to the root port.

    sysfs puts a device's folder into the folder of the port above.
    """
    links = []
    lower = Path(os.path.realpath(device))  # Path.resolve() raises for circular links
    while (now := _link(lower, "current")) and (peak := _link(lower, "max")) and now[0] <= peak[0]:
        port = _link(lower.parent, "max") or peak
        links.append((now[0], min(peak[0], port[0]), now[1], min(peak[1], port[1])))
        lower = lower.parent.parent  # the upper end of the port's switch
    return links


def _link(device: Path, which: str) -> tuple[int, float] | None:
    width = number(device / f"{which}_link_width")
    speed = as_decimal(text(device / f"{which}_link_speed"))
    return (width, speed) if width and speed else None


def xgmi(facts: Facts) -> Finding | None:
    """Check that all GPUs of a hive are linked to each other."""
    hardware = facts.hardware
    if len(facts.amd_gpus) < 2 or hardware is None or hardware.link != LinkKind.xgmi:
        return None
    hives: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in facts.amd_gpus:
        hives[gpu.hive or ""].append(gpu)
    alone = hives.pop("", [])
    if not hives:
        return warn(
            "no GPU is in a hive, so all traffic goes over PCIe",
            "reseat the xGMI bridge; without a bridge, do nothing",
        )
    if not any(gpu.links for gpu in facts.amd_gpus):
        return unknown("the topology lists no links", "amd-smi topology")
    pairs = [pair for hive in hives.values() for pair in itertools.permutations(hive, 2)]
    missing = [
        f"{gpu.node}-{other.node}"
        for gpu, other in pairs
        if not any(link.node == other.node and link.kind == "xgmi" for link in gpu.links)
        # partitions of one GPU need no link
        and (gpu.pci_address is None or gpu.pci_address != other.pci_address)
    ]
    if missing:
        remedy = (
            "power the machine off and on; if amd-smi topology still shows no link, the board or "
            "a bridge is faulty"
        )
        return fail(
            f"no xGMI between nodes {', '.join(missing[:6])} ({len(missing)} links missing)", remedy
        )
    if alone:
        return warn(
            f"{len(alone)} GPU(s) are in no hive, so their traffic goes over PCIe",
            "reseat the xGMI bridge, or exclude the GPUs from runs",
        )
    # Also count GPUs that a run or a container excludes. The hive of a GPU that the kernel hides is
    # unknown (None). Partitions share an address.
    members: dict[str | None, set[str | int | None]] = defaultdict(set)
    for gpu in (*facts.host.gpus, *facts.host.withheld):
        if gpu.hive or not gpu.usable:
            members[gpu.hive].add(gpu.pci_address or gpu.node)
    hive_size = hardware.hive or hardware.gpus_per_node
    possible_sizes = (hive_size, hardware.gpus_per_node, *SMALL_HIVES)
    odd_sizes = [len(gpus) for gpus in members.values() if len(gpus) not in possible_sizes]
    if odd_sizes and None not in members:
        remedy = (
            "look for a lost GPU (sudo dmesg | grep -i amdgpu), then power the machine off and "
            "on; in a virtual machine with fewer GPUs, do nothing"
        )
        return warn(f"a hive of {odd_sizes[0]} GPUs, but {facts.group} has {hive_size}", remedy)
    sizes = " + ".join(str(len(hive)) for hive in hives.values())
    return passed(f"{len(hives)} hive(s) of {sizes} GPUs, complete")
