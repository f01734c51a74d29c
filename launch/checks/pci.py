"""How GPUs reach memory and one another: IOMMU, ACS, PCIe, xGMI."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.gpu import Gpu
from launch.kfd import GTT
from launch.schema_enums import Link as LinkKind
from launch.sysfs import as_decimal, number, text

BRIDGE = "0x0604"  # PCI class
PUBLIC = 64  # bytes of configuration that anybody may read
HEADER = 256  # bytes that stand before the extended capabilities; a bridge of plain PCI has no more
ACS = 0x000D  # number of the extended capability; its control register is 6 bytes in, its low five bits redirect peer traffic
ACS_BITS = 0b11111
GRUB = "/etc/default/grub"


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
    on = any((facts.root / "sys/class/iommu").glob("*")) or any((facts.root / "sys/kernel/iommu_groups").glob("*"))
    if not on and not modes:
        if not words:
            return expected.unknown("neither /proc/cmdline nor /sys/class/iommu is there", "cat /proc/cmdline")
        return expected.passed("no IOMMU is on")
    read = f"an IOMMU is on, without iommu=pt{f' (mode {min(filter(None, modes))})' if modes else ''}"
    cure = f"add iommu=pt (on Intel: intel_iommu=on iommu=pt) to GRUB_CMDLINE_LINUX in {GRUB}, sudo update-grub, reboot"
    return expected.fail(read, cure)


def acs(facts: Facts) -> Finding | None:
    """Access control services of the bridges send peer copies through the root complex."""
    if len(facts.gpus) < 2:
        return None
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
    """Width and speed of each GPU's link, against what both its ends can do."""
    found = [gpu for gpu in facts.whole_gpus() if gpu.gfx not in GTT]  # an integrated one has no link
    if not found:
        return None
    expected = Expected("each GPU at its own full width and speed", "max_link_width, max_link_speed of the device (sysfs)")
    narrow, slow, unknown, words = [], [], [], set()
    for gpu in found:
        device = facts.device(gpu)
        width, widest = number(device / "current_link_width"), number(device / "max_link_width")
        speed, fastest = (as_decimal(text(device / f"{which}_link_speed")) for which in ("current", "max"))
        if not (width and widest and speed and fastest) or width > widest:
            unknown.append(gpu.pci_address)
            continue
        words.add(f"x{width} at {speed:g} GT/s")
        narrow += [f"{gpu.pci_address} x{width} of x{widest}"] if width < widest else []
        slow += [f"{gpu.pci_address} {speed:g} of {fastest:g} GT/s"] if speed < fastest else []
    if narrow:
        return expected.fail("; ".join(narrow[:4]), "switch off, seat the card and its riser anew, in a slot of full width; sudo lspci -vv")
    if slow:
        return expected.warn(
            "; ".join(slow[:4]), "cards slow their link down when idle: look again during a run. Else PCIe speed in the BIOS: auto"
        )
    if unknown:
        return expected.unknown(f"not stated for {len(unknown)} of {len(found)} GPUs", f"sudo lspci -vv -s {unknown[0]} | grep LnkSta")
    return expected.passed(f"{len(found)} GPUs: {', '.join(sorted(words))}")


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
    if missing or alone:
        read = f"no xGMI between nodes {', '.join(missing[:6])}" if missing else f"{len(alone)} GPUs in no hive"
        cure = "power the machine off and on; if it stays, the board or a bridge is at fault: amd-smi topology"
        return expected.fail(f"{read} ({len(missing)} links missing)", cure)
    sizes = " + ".join(str(len(hive)) for hive in hives.values())
    return expected.passed(f"{len(hives)} hive(s) of {sizes} GPUs, complete")


def _linked(one: Gpu, other: Gpu) -> bool:
    return any(link.node == other.node and link.kind == "xgmi" for link in one.links)
