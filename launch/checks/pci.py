"""How GPUs reach memory and one another: IOMMU, ACS, PCIe, xGMI."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding, boot_with
from launch.machine.gpu import Gpu
from launch.machine.kfd import GTT
from launch.machine.sysfs import as_decimal, number, text
from launch.schema.enums import Link as LinkKind

BRIDGE = "0x0604"  # PCI class
PUBLIC = 64  # bytes of configuration that anybody may read
HEADER = 256  # bytes that stand before the extended capabilities; a bridge of plain PCI has no more
ACS = 0x000D  # number of the extended capability; its control register is 6 bytes in, its low five bits redirect peer traffic
ACS_BITS = 0b11111
PARTS = (1, 2, 4)  # GPUs of a hive that a virtual machine is given, or that a bridge joins
PARAMETERS = "iommu=pt"  # on Intel too, where the IOMMU is on


def iommu(facts: Facts) -> Finding | None:
    """Whether peer copies are translated. In a virtual machine the host's own IOMMU does not show."""
    several_from = facts.needs.iommu_pt_from
    if several_from is None or len(facts.amd_gpus) < several_from:
        return None
    expected = Expected(f"no IOMMU, or iommu=pt, from {several_from} GPUs on", f"conf/hardware: host.iommu_pt_from of {facts.group}")
    words = (facts.file("proc/cmdline") or "").split()
    modes = {text(facts.device(gpu) / "iommu_group/type") for gpu in facts.whole_gpus()} - {None}
    if "iommu=pt" in words or modes == {"identity"}:
        return expected.passed("the GPUs pass through")
    if modes:
        return expected.fail(f"an IOMMU translates (mode {min(filter(None, modes))})", boot_with(PARAMETERS))
    if any((facts.root / "sys/class/iommu").glob("*")) or not words:
        return expected.unknown("the GPUs' iommu_group/type cannot be read", "cat /sys/bus/pci/devices/*/iommu_group/type")
    return expected.passed("no IOMMU is on")


def acs(facts: Facts) -> Finding | None:
    """Access control services of the bridges send peer copies through the root complex."""
    if len(facts.gpus) < 2:
        return None
    if _all_xgmi(facts) and not any((facts.root / "sys/class/infiniband").glob("*")):
        return None  # no peer copy passes a bridge
    expected = Expected("off on every PCIe bridge", "AMD's workload guide (RCCL over PCIe and between nodes): lspci -vvv | grep ACSCtl")
    found = (facts.root / "sys/bus/pci/devices").glob("*")
    bridges = sorted(path for path in found if (text(path / "class") or "").startswith(BRIDGE))
    if not bridges:
        return expected.unknown("no PCIe bridge shows here (a virtual machine, or a copied tree)", "sudo lspci -vvv | grep -i acsctl")
    control = {bridge.name: _acs_control(bridge / "config") for bridge in bridges}
    on = [name for name, bits in control.items() if bits]
    if on:
        read = f"on at {len(on)} of {len(bridges)} bridges: {', '.join(on[:4])}"
        return expected.warn(read, f"sudo setpci -s {on[0]} ECAP_ACS+0x6.w=0000, and so on for each; or off in the BIOS")
    if any(bits is None for bits in control.values()):
        return expected.unknown("only root may read it", "sudo lspci -vvv | grep -i acsctl: `SrcValid+` is on")
    return expected.passed(f"off at {len(bridges)} bridges")


def _all_xgmi(facts: Facts) -> bool:
    return len({gpu.hive for gpu in facts.gpus}) == 1 and facts.gpus[0].hive is not None


def _acs_control(config: Path) -> int | None:
    """Bits that are set; 0 where a bridge has none, None where only root would see."""
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
    """Width and speed of every link from a GPU up to the root port, against what both its ends can do.

    Many cards have a switch of their own: the link of the GPU itself never leaves the board, that of the slot is further up.
    """
    found = [gpu for gpu in facts.whole_gpus() if gpu.gfx not in GTT]  # an integrated one has no link
    if not found:
        return None
    expected = Expected("each GPU at the full width and speed of its slot", "current_ and max_link_width, _speed of both ends (sysfs)")
    narrow: list[str] = []
    slow: list[str] = []
    resting: list[str] = []
    unknown, words = [], set()
    for gpu in found:
        links = _links_up(facts.device(gpu))
        if not links:
            unknown.append(gpu.pci_address)
        for width, widest, speed, fastest in links:
            words.add(f"x{width} at {speed:g} GT/s")
            narrow += [f"{gpu.pci_address} x{width} of x{widest}"] if width < widest else []
            if speed < fastest:
                (resting if _rests(facts.device(gpu)) else slow).append(f"{gpu.pci_address} {speed:g} of {fastest:g} GT/s")
    if narrow:
        return expected.fail("; ".join(narrow[:4]), "switch off, seat the card and its riser anew, in a slot of full width; sudo lspci -vv")
    if slow:
        return expected.warn("; ".join(slow[:4]), "PCIe speed in the BIOS: auto; seat the card and its riser anew; sudo lspci -vv")
    if resting:
        return expected.unknown(f"{'; '.join(resting[:4])}, idle", "look again during a run: cards slow their link down when idle")
    if unknown:
        return expected.unknown(f"not stated for {len(unknown)} of {len(found)} GPUs", f"sudo lspci -vv -s {unknown[0]} | grep LnkSta")
    return expected.passed(f"{len(found)} GPUs: {', '.join(sorted(words))}")


def _links_up(device: Path) -> list[tuple[int, int, float, float]]:
    """Width now and at best, GT/s now and at best, of each link. Folders of a device stand in that of the port above it."""
    found = []
    lower = Path(os.path.realpath(device))  # Path.resolve() raises for links in a circle
    while (now := _link(lower, "current")) and (best := _link(lower, "max")) and now[0] <= best[0]:
        port = _link(lower.parent, "max") or best
        found.append((now[0], min(best[0], port[0]), now[1], min(best[1], port[1])))
        lower = lower.parent.parent  # the upper end of the switch that the port belongs to
    return found


def _link(device: Path, which: str) -> tuple[int, float] | None:
    width, speed = number(device / f"{which}_link_width"), as_decimal(text(device / f"{which}_link_speed"))
    return (width, speed) if width and speed else None


def _rests(device: Path) -> bool:
    """A card that draws (PCI class) and has nothing to do. Accelerators keep their speed."""
    return not number(device / "gpu_busy_percent") and (text(device / "class") or "").startswith("0x03")


def xgmi(facts: Facts) -> Finding | None:
    """Within a hive every GPU has a link to every other."""
    if len(facts.amd_gpus) < 2 or facts.hardware is None or facts.hardware.link != LinkKind.xgmi:
        return None
    expected = Expected("every GPU of a hive linked with every other", "kernel topology: io_links of type 11; conf/hardware: link")
    hives: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in facts.amd_gpus:
        hives[gpu.hive or ""].append(gpu)
    alone = hives.pop("", [])
    if not hives:
        return expected.warn("no GPU is in a hive: all traffic goes over PCIe", "seat the bridge; without one the machine can do no more")
    if not any(gpu.links for gpu in facts.amd_gpus):
        return expected.unknown("the topology states no links", "amd-smi topology")
    missing = [f"{a.node}-{b.node}" for hive in hives.values() for a in hive for b in hive if a is not b and not _linked(a, b)]
    if missing:
        cure = "power the machine off and on; if it stays, the board or a bridge is at fault: amd-smi topology"
        return expected.fail(f"no xGMI between nodes {', '.join(missing[:6])} ({len(missing)} links missing)", cure)
    if alone:
        return expected.warn(f"{len(alone)} GPUs in no hive: their traffic goes over PCIe", "seat the bridge; or leave them out of a run")
    sizes = " + ".join(str(len(hive)) for hive in hives.values())
    whole = facts.hardware.hive or facts.hardware.gpus_per_node
    odd = [size for size in _hive_sizes(facts) if size not in (whole, facts.hardware.gpus_per_node, *PARTS)]
    if odd:
        cure = (
            "sudo dmesg | grep -i amdgpu for one that is lost, power the machine off and on; a virtual machine that was given no more can "
            "stay as it is"
        )
        return expected.warn(f"a hive of {odd[0]} GPUs, and one of {facts.group} has {whole}", cure)
    return expected.passed(f"{len(hives)} hive(s) of {sizes} GPUs, complete")


def _hive_sizes(facts: Facts) -> list[int]:
    """GPUs of each hive of the machine, also those that a run or a container leaves out; none where the kernel hides some of them."""
    here = [gpu for gpu in (*facts.host.gpus, *facts.host.withheld) if gpu.hive or not gpu.usable]
    hives: dict[str | None, set[str | int | None]] = defaultdict(set)
    for gpu in here:
        hives[gpu.hive].add(gpu.pci_address or gpu.node)  # partitions share an address
    return [] if None in hives else [len(gpus) for gpus in hives.values()]


def _linked(one: Gpu, other: Gpu) -> bool:
    """Two partitions of a GPU need none."""
    same_card = one.pci_address is not None and one.pci_address == other.pci_address
    return same_card or any(link.node == other.node and link.kind == "xgmi" for link in one.links)
