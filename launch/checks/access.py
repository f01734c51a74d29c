"""Check which GPUs this machine has, of which group of conf/hardware, and who may open them."""

from __future__ import annotations

from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, fail_or_warn, passed, unknown, warn
from launch.machine import detect, kfd, masks
from launch.machine.sysfs import folders, is_folder, status_of
from launch.schema.enums import Vendor

GUIDE = "AMD's installation guide, `Configuring permissions for GPU access`"
KFD = "/dev/kfd"
TOPOLOGY = "sys/class/kfd/kfd/topology"
NOT_COPIED = "copy it as well, or run the doctor on that machine"


def hardware_group(facts: Facts) -> Finding | None:
    gpus = masks.visible((*facts.gpus, *facts.host.withheld), facts.host.environ)
    unread = unread_nodes(facts)
    if not gpus:
        return unknown(*unread) if unread else None
    hardware, fault = facts.hardware, detect.group_fault(gpus, facts.host.gpus)
    requested = f"hardware={facts.group} was asked for"
    if fault:
        read, cure = fault
    else:
        group = detect.group_of(gpus)
        read = detect.detection_line(gpus, group).removeprefix("hardware=auto: ")
        cure = f"hardware={group}, or hardware=auto"
    # A GPU without a group may run the code: the user named the closest group, and products of one
    # target differ only in size.
    if (
        hardware is not None
        and hardware.vendor != Vendor.none
        and all(
            gpu.gfx not in (hardware.gfx, "unknown") and (gpu.group or gpu.partition_of)
            for gpu in gpus
        )
    ):
        return fail(
            f"{read}, and {requested}: it has code for {hardware.gfx} only",
            "hardware=auto, or the group of this machine's GPU",
        )
    if fault and hardware is not None and all(facts.group in gpu.may_be for gpu in gpus):
        return passed(f"{read}; {requested}")
    if fault and (hardware is None or any(gpu.partition_of for gpu in gpus)):
        return fail(read, cure)
    if fault or (hardware is not None and facts.group != group):
        return warn(f"{read}, and {requested}", cure)
    return unknown(f"{read}; {unread[0]}", unread[1]) if unread else passed(read)


def unread_nodes(facts: Facts) -> tuple[str, str] | None:
    """Return which nodes are unreadable, or that a copied tree has none, and how to find out."""
    if nodes := kfd.unidentified_nodes(facts.root):
        names = f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))}"
        return (
            f"{names} of {TOPOLOGY} without properties that can be read",
            f"cat /{TOPOLOGY}/nodes/{nodes[0]}/properties; if that is empty too, sudo dmesg | "
            "grep -i amdgpu",
        )
    if is_folder(facts.root / "sys/class/kfd") and not folders(facts.root / TOPOLOGY / "nodes"):
        return (
            f"{TOPOLOGY} has no nodes, although a kernel has at least one per CPU",
            f"copy it whole: cp -rL /{TOPOLOGY} DIR/{TOPOLOGY}",
        )
    return None


def gpus_found(facts: Facts) -> Finding | None:
    """Look for a card on the bus that the driver hides because it failed to start or was lost."""
    cards = facts.amd_cards() if facts.is_amd else []
    if not cards:
        return None
    shown = {gpu.pci_address for gpu in (*facts.gpus, *facts.host.withheld)}
    hidden = [card for card in cards if card not in shown]
    # The container sees these but may not open them.
    if len(hidden) <= sum(gpu.pci_address is None for gpu in facts.host.withheld):
        return passed(f"{len(cards)} on the bus, all of them shown")
    read = f"{', '.join(hidden)} on the bus, not in /sys/class/kfd"
    cure = f"sudo dmesg | grep {hidden[0]}; a GPU too old for ROCm needs nothing; otherwise reboot"
    return fail_or_warn(not facts.gpus, read, cure)


def kfd_node(facts: Facts) -> Finding | None:
    if left_out := _left_out(facts):
        return unknown(f"this tree holds no {left_out}", NOT_COPIED)
    if KFD not in facts.host.device_nodes:
        cure = (
            f"on the host: sudo modprobe amdgpu. In a container: docker run --device {KFD} "
            "--device /dev/dri/renderD128 ..."
        )
        return fail(f"{KFD} is missing", cure)
    if facts.may_open(KFD):
        return passed(f"{KFD} opens for uid {facts.host.uid}")
    return fail(f"{KFD} is closed to uid {facts.host.uid}", _join_groups(facts, [KFD]))


def render_nodes(facts: Facts) -> Finding | None:
    """Look for the render node of each GPU. A container may have only some of them."""
    gpus = facts.gpus if facts.only is not None else (*facts.gpus, *facts.host.withheld)
    minors = [gpu.render_minor for gpu in gpus if gpu.gfx.startswith("gfx")]
    nodes = list(dict.fromkeys(f"/dev/dri/renderD{n}" for n in minors if n is not None))
    if not nodes:
        return None
    if left_out := _left_out(facts):
        return unknown(f"this tree holds no {left_out}", NOT_COPIED)
    uid = facts.host.uid
    missing = [node for node in nodes if node not in facts.host.device_nodes]
    if closed := [node for node in nodes if node not in missing and not facts.may_open(node)]:
        return fail(f"{_some(closed)} closed to uid {uid}", _join_groups(facts, closed))
    if not missing:
        return passed(f"{len(nodes)} of {len(nodes)} open for uid {uid}")
    all_missing = len(missing) == len(nodes)
    if facts.is_contained and not all_missing:
        opened = len(nodes) - len(missing)
        return passed(f"{opened} open for uid {uid}, {len(missing)} not given to this container")
    read = f"{_some(missing)} missing: {len(missing)} of {len(nodes)} GPUs are not usable here"
    cure = "pass them to the container: " + " ".join(f"--device {node}" for node in missing[:8])
    return fail_or_warn(all_missing, read, cure)


def _left_out(facts: Facts) -> str | None:
    """Return the files that a copied tree lacks to show device permissions."""
    paths = ("dev", "proc/self/status")
    return next((path for path in paths if status_of(facts.root / path) is None), None)


def _some(nodes: list[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _join_groups(facts: Facts, nodes: list[str]) -> str:
    """Name groups by number if this machine (a container) has no name for the host's group."""
    gids = sorted({gid for node in nodes if (gid := facts.host.device_nodes[node]) is not None})
    if 0 in gids:  # root's group: udev has not yet changed the node's group to render
        return (
            f"on the host: sudo chgrp render {' '.join(nodes)}; sudo usermod -aG render,video "
            "$USER, then log in again"
        )
    names = {number: name for name, number in facts.host.gids.items()}
    outside = ",".join(names.get(gid, str(gid)) for gid in gids)
    inside = " ".join(f"--group-add {gid}" for gid in gids)
    return (
        f"sudo usermod -aG {outside} $USER, then log in again. In a container: docker run "
        f"{inside} ..."
    )
