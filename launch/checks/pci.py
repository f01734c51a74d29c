"""Check how GPUs reach memory and one another: IOMMU, ACS, PCIe, xGMI."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Finding, boot_with, fail, passed, some, unknown, warn
from launch.machine.gpu import Gpu
from launch.machine.kfd import INTEGRATED
from launch.machine.sysfs import as_decimal, number, text
from launch.schema.enums import Link as LinkKind

BRIDGE = "0x0604"  # PCI class
PUBLIC = 64  # bytes of configuration that anybody may read
HEADER = 256  # bytes before the extended capabilities; a plain PCI bridge has no more
# Number of the extended capability. Its control register is at offset 6; the low five bits redirect
# peer traffic.
ACS = 0x000D
ACS_BITS = 0b11111
PARTS = (1, 2, 4)  # possible numbers of GPUs in a hive: of a virtual machine or a bridge
PARAMETERS = "iommu=pt"  # on Intel too, if the IOMMU is on


def iommu(facts: Facts) -> Finding | None:
    """Check whether the IOMMU translates peer copies.

    In a virtual machine the host's own IOMMU is not visible.
    """
    if len(facts.amd_gpus) < (facts.needs.iommu_pt_from or 0):
        return None
    words = (facts.file("proc/cmdline") or "").split()
    types = (text(facts.device(gpu) / "iommu_group/type") for gpu in facts.whole_gpus())
    modes = set(filter(None, types))
    if "iommu=pt" in words or modes == {"identity"}:
        return passed("the GPUs pass through")
    if modes:
        return fail(f"an IOMMU translates (mode {min(modes)})", boot_with(PARAMETERS))
    if any((facts.root / "sys/class/iommu").glob("*")) or not words:
        look = "cat /sys/bus/pci/devices/*/iommu_group/type"
        return unknown("the GPUs' iommu_group/type cannot be read", look)
    return passed("no IOMMU is on")


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
            "no PCIe bridge shows here (a virtual machine, or a copied tree)",
            "sudo lspci -vvv | grep -i acsctl",
        )
    control = {bridge.name: _acs_control(bridge / "config") for bridge in bridges}
    if on := [name for name, bits in control.items() if bits]:
        return warn(
            f"on at {len(on)} of {len(bridges)} bridges: {', '.join(on[:4])}",
            f"sudo setpci -s {on[0]} ECAP_ACS+0x6.w=0000, likewise for each; or disable ACS in "
            "BIOS",
        )
    if None in control.values():
        return unknown(
            "only root may read it", "sudo lspci -vvv | grep -i acsctl: `SrcValid+` is on"
        )
    return passed(f"off at {len(bridges)} bridges")


def _acs_control(config: Path) -> int | None:
    """Return the control bits that are set; 0 if a bridge has none, None if only root can read."""
    try:
        data = config.read_bytes()
    except OSError:
        return None
    if len(data) <= PUBLIC:
        return None
    at, seen = HEADER, set()
    while at >= HEADER and at + 8 <= len(data) and at not in seen:
        seen.add(at)
        head = int.from_bytes(data[at : at + 4], "little")
        if head & 0xFFFF == ACS:
            return int.from_bytes(data[at + 6 : at + 8], "little") & ACS_BITS
        at = head >> 20
    return 0


def pcie(facts: Facts) -> Finding | None:
    """Compare every link from a GPU to the root port with the capability of both ends.

    Many cards have their own switch. There the GPU's link never leaves the board, and the slot's
    link is further up.
    """
    # an integrated GPU has no link
    gpus = [gpu for gpu in facts.whole_gpus() if gpu.gfx not in INTEGRATED]
    if not gpus:
        return None
    faults = defaultdict[str, list[str]](list)
    words = set()
    for gpu in gpus:
        device, address = facts.device(gpu), gpu.pci_address
        # A display card slows its link down when idle; accelerators do not.
        draws = (text(device / "class") or "").startswith("0x03")
        rests = draws and not number(device / "gpu_busy_percent")
        links = _links_up(device)
        if not links:
            faults["unread"].append(address or "")
        for width, widest, speed, fastest in links:
            words.add(f"x{width} at {speed:g} GT/s")
            if width < widest:
                faults["narrow"].append(f"{address} x{width} of x{widest}")
            if speed < fastest:
                kind = "resting" if rests else "slow"
                faults[kind].append(f"{address} {speed:g} of {fastest:g} GT/s")
    seat = "reseat the card and its riser"
    if narrow := faults["narrow"]:
        cure = f"switch off, {seat}, in a slot of full width; sudo lspci -vv"
        return fail(some(narrow), cure)
    if slow := faults["slow"]:
        return warn(some(slow), f"PCIe speed in the BIOS: auto; {seat}; sudo lspci -vv")
    if resting := faults["resting"]:
        cure = "check again during a run, because idle cards slow their link"
        return unknown(f"{some(resting)}, idle", cure)
    if unread := faults["unread"]:
        read = f"not stated for {len(unread)} of {len(gpus)} GPUs"
        return unknown(read, f"sudo lspci -vv -s {unread[0]} | grep LnkSta")
    return passed(f"{len(gpus)} GPUs: {', '.join(sorted(words))}")


def _links_up(device: Path) -> list[tuple[int, int, float, float]]:
    """Return (width, best width, GT/s, best GT/s) of each link.

    A device's folder is in the folder of the port above it.
    """
    links = []
    lower = Path(os.path.realpath(device))  # Path.resolve() raises for circular links
    while (now := _link(lower, "current")) and (best := _link(lower, "max")) and now[0] <= best[0]:
        port = _link(lower.parent, "max") or best
        links.append((now[0], min(best[0], port[0]), now[1], min(best[1], port[1])))
        lower = lower.parent.parent  # the upper end of the switch that the port belongs to
    return links


def _link(device: Path, which: str) -> tuple[int, float] | None:
    width = number(device / f"{which}_link_width")
    speed = as_decimal(text(device / f"{which}_link_speed"))
    return (width, speed) if width and speed else None


def xgmi(facts: Facts) -> Finding | None:
    """Check that every GPU of a hive has a link to every other."""
    hardware = facts.hardware
    if len(facts.amd_gpus) < 2 or hardware is None or hardware.link != LinkKind.xgmi:
        return None
    hives: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in facts.amd_gpus:
        hives[gpu.hive or ""].append(gpu)
    alone = hives.pop("", [])
    if not hives:
        return warn(
            "no GPU is in a hive: all traffic goes over PCIe",
            "seat the bridge; without a bridge, PCIe is the limit",
        )
    if not any(gpu.links for gpu in facts.amd_gpus):
        return unknown("the topology states no links", "amd-smi topology")
    pairs = [pair for hive in hives.values() for pair in itertools.permutations(hive, 2)]
    missing = [
        f"{gpu.node}-{other.node}"
        for gpu, other in pairs
        if not any(link.node == other.node and link.kind == "xgmi" for link in gpu.links)
        # two partitions of a GPU need no link
        and (gpu.pci_address is None or gpu.pci_address != other.pci_address)
    ]
    if missing:
        cure = (
            "power the machine off and on; if it stays, the board or a bridge is at fault: "
            "amd-smi topology"
        )
        return fail(
            f"no xGMI between nodes {', '.join(missing[:6])} ({len(missing)} links missing)", cure
        )
    if alone:
        return warn(
            f"{len(alone)} GPUs in no hive: their traffic goes over PCIe",
            "seat the bridge; or leave them out of a run",
        )
    # Count the GPUs that a run or a container leaves out too, unless the kernel hides some of them.
    # Partitions share an address.
    members: dict[str | None, set[str | int | None]] = defaultdict(set)
    for gpu in (*facts.host.gpus, *facts.host.withheld):
        if gpu.hive or not gpu.usable:
            members[gpu.hive].add(gpu.pci_address or gpu.node)
    whole = hardware.hive or hardware.gpus_per_node
    usual = (whole, hardware.gpus_per_node, *PARTS)
    odd = [len(gpus) for gpus in members.values() if len(gpus) not in usual]
    if odd and None not in members:
        cure = (
            "sudo dmesg | grep -i amdgpu for one that is lost, power the machine off and on; "
            "in a virtual machine with fewer GPUs, do nothing"
        )
        return warn(f"a hive of {odd[0]} GPUs, but {facts.group} has {whole}", cure)
    sizes = " + ".join(str(len(hive)) for hive in hives.values())
    return passed(f"{len(hives)} hive(s) of {sizes} GPUs, complete")
