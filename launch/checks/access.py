"""Which GPUs are here, which group of conf/hardware they are, and whether the caller may open them."""

from __future__ import annotations

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.machine import detect, kfd, masks
from launch.machine.gpu import Gpu
from launch.machine.sysfs import folders, is_folder, status_of
from launch.schema import Hardware
from launch.schema.enums import Vendor

GUIDE = "AMD's installation guide, `Configuring permissions for GPU access`"
KFD = "/dev/kfd"
TOPOLOGY = "sys/class/kfd/kfd/topology"
NOT_COPIED = "copy it too, or run the doctor on the machine itself"


def hardware_group(facts: Facts) -> Finding | None:
    found = masks.visible((*facts.gpus, *facts.host.withheld), facts.host.environ)
    expected = Expected("one kind of GPU, which a file of conf/hardware describes", "conf/hardware; launch/machine/products.py")
    unread = _unread(facts)
    if not found:
        lacks = unread or (None if facts.is_live else _lacking(facts))
        return expected.unknown(*lacks) if lacks else None
    wrong = detect.undecided(found, facts.host.gpus)
    if _is_other_code(found, facts.hardware):
        read = wrong[0] if wrong else detect.found_line(found, detect.group_of(found)).removeprefix("hardware=auto: ")
        why = f"hardware={facts.group} was asked for: its code is for {facts.hardware.gfx if facts.hardware else 'another GPU'}"
        return expected.fail(f"{read}, and {why}", "hardware=auto, or the group of the GPU that is here")
    if wrong and facts.hardware is not None and all(facts.group in gpu.may_be for gpu in found):
        return expected.passed(f"{wrong[0]}; hardware={facts.group} was asked for")
    if wrong and facts.hardware is not None and not any(gpu.partition_of for gpu in found):
        return expected.warn(f"{wrong[0]}, and hardware={facts.group} was asked for", wrong[1])
    if wrong:
        return expected.fail(*wrong)
    group = detect.group_of(found)
    read = detect.found_line(found, group).removeprefix("hardware=auto: ")
    if facts.hardware is not None and facts.group != group:
        return expected.warn(f"{read}, and hardware={facts.group} was asked for", f"hardware={group}, or hardware=auto")
    return expected.unknown(f"{read}; {unread[0]}", unread[1]) if unread else expected.passed(read)


def _unread(facts: Facts) -> tuple[str, str] | None:
    """A node that may be one more GPU, and how to look at it."""
    nodes = kfd.unread(facts.root)
    if not nodes:
        return None
    said = f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))} of {TOPOLOGY} without properties that can be read"
    return said, f"cat /{TOPOLOGY}/nodes/{nodes[0]}/properties; where the kernel leaves it empty too, sudo dmesg | grep -i amdgpu"


def _lacking(facts: Facts) -> tuple[str, str] | None:
    """What a copied tree without a GPU lacks, so that nobody can say that the machine had none; and how a tree is made."""
    if not is_folder(facts.root / "sys"):
        also = "" if is_folder(facts.root / "proc") else " and no proc, so it stands for no machine"
        return (
            f"this tree holds no sys{also}",
            f"sysroot=DIR stands for /: copy sys, proc, dev and etc into it; of a topology alone, cp -rL /{TOPOLOGY} to DIR/{TOPOLOGY}",
        )
    if is_folder(facts.root / "sys/class/kfd") and not folders(facts.root / TOPOLOGY / "nodes"):
        return (
            f"{TOPOLOGY} holds no nodes, and a kernel's has one for each CPU at least",
            f"copy it whole: cp -rL /{TOPOLOGY} DIR/{TOPOLOGY}",
        )
    return None


def _is_other_code(found: tuple[Gpu, ...], asked: Hardware | None) -> bool:
    """Whether no GPU here runs what is built for the group that was asked for. One that no group describes may: the one named for it is
    near, and a product of the same target is only of another size."""
    if asked is None or asked.vendor == Vendor.none:
        return False
    return all(gpu.gfx not in (asked.gfx, "unknown") and (gpu.group or gpu.partition_of) for gpu in found)


def gpus_found(facts: Facts) -> Finding | None:
    """A card on the bus that the driver does not show: it failed to start, or fell off."""
    cards = facts.amd_cards() if facts.is_amd else []
    shown = {gpu.pci_address for gpu in (*facts.gpus, *facts.host.withheld)}
    expected = Expected("every AMD GPU on the PCI bus is in the kernel's topology", "linux amdkfd: a GPU without a node serves no ROCm")
    if not cards:
        return None
    hidden = [card for card in cards if card not in shown]
    if len(hidden) <= len([gpu for gpu in facts.host.withheld if gpu.pci_address is None]):  # shown, but closed to this container
        return expected.passed(f"{len(cards)} on the bus, all of them shown")
    read = f"{', '.join(hidden)} on the bus, not in /sys/class/kfd"
    cure = f"sudo dmesg | grep {hidden[0]}; a GPU too old for ROCm can stay as it is, one that should be there needs a reboot"
    return expected.warn(read, cure) if facts.gpus else expected.fail(read, cure)


def kfd_node(facts: Facts) -> Finding | None:
    if not facts.is_amd:
        return None
    expected = Expected(f"{KFD} is there, and you may read and write it", GUIDE)
    if _left_out(facts):
        return expected.unknown(f"this tree holds no {_left_out(facts)}", NOT_COPIED)
    if KFD not in facts.host.device_nodes:
        return expected.fail(
            f"{KFD} is missing",
            f"on the host: sudo modprobe amdgpu. In a container: docker run --device {KFD} --device /dev/dri/renderD128 ...",
        )
    if facts.may_open(KFD):
        return expected.passed(f"{KFD} opens for uid {facts.host.uid}")
    return expected.fail(f"{KFD} is closed to uid {facts.host.uid}", _join_groups(facts, [KFD]))


def render_nodes(facts: Facts) -> Finding | None:
    """One for each GPU; a container may have been given some of them."""
    found = facts.gpus if facts.only is not None else (*facts.gpus, *facts.host.withheld)
    wanted = {f"/dev/dri/renderD{gpu.render_minor}": gpu for gpu in found if gpu.render_minor is not None and gpu.gfx.startswith("gfx")}
    if not wanted:
        return None
    expected = Expected("a /dev/dri/renderD<N> for each GPU, which you may read and write", GUIDE)
    if _left_out(facts):
        return expected.unknown(f"this tree holds no {_left_out(facts)}", NOT_COPIED)
    missing = [node for node in wanted if node not in facts.host.device_nodes]
    closed = [node for node in wanted if node not in missing and not facts.may_open(node)]
    if closed:
        return expected.fail(f"{_some(closed)} closed to uid {facts.host.uid}", _join_groups(facts, closed))
    if missing:
        read = f"{_some(missing)} missing: {len(missing)} of {len(wanted)} GPUs do not count here"
        if facts.is_contained and len(missing) < len(wanted):
            return expected.passed(
                f"{len(wanted) - len(missing)} open for uid {facts.host.uid}, {len(missing)} not given to this container"
            )
        cure = "give them to the container: " + " ".join(f"--device {node}" for node in missing[:8])
        return expected.fail(read, cure) if len(missing) == len(wanted) else expected.warn(read, cure)
    return expected.passed(f"{len(wanted)} of {len(wanted)} open for uid {facts.host.uid}")


def _left_out(facts: Facts) -> str | None:
    """Of a copied machine: without its device nodes, or without who asks, nobody can say who may open what."""
    return next((path for path in ("dev", "proc/self/status") if status_of(facts.root / path) is None), None)


def _some(nodes: list[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _join_groups(facts: Facts, nodes: list[str]) -> str:
    """By number where this machine (a container) has no name for the host's group."""
    gids = sorted({gid for node in nodes if (gid := facts.host.device_nodes[node]) is not None})
    if 0 in gids:  # nobody should have to be in root's group: udev has not given the node to render
        return f"on the host: sudo chgrp render {' '.join(nodes)}; sudo usermod -aG render,video $USER, then log in again"
    names = {number: name for name, number in facts.host.gids.items()}
    outside = ",".join(names.get(gid, str(gid)) for gid in gids)
    inside = " ".join(f"--group-add {gid}" for gid in gids)
    return f"sudo usermod -aG {outside} $USER, then log in again. In a container: docker run {inside} ..."
