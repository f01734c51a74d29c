"""Check the GPUs of a machine: their group in conf/hardware, and whether the user may open them."""

from __future__ import annotations

from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, fail_or_warn, first_few, passed, unknown, warn
from launch.machine import detect, kfd, masks
from launch.machine.sysfs import folders, is_folder, status_of
from launch.schema.enums import Vendor

GUIDE = "AMD's installation guide, `Configuring permissions for GPU access`"
KFD = "/dev/kfd"
TOPOLOGY = "sys/class/kfd/kfd/topology"
NOT_COPIED = "copy it as well, or run the doctor on that machine"


def hardware_group(facts: Facts) -> Finding | None:
    gpus = masks.visible((*facts.gpus, *facts.host.withheld), facts.host.environ)
    unreadable = unreadable_nodes(facts)
    if not gpus:
        return unknown(*unreadable) if unreadable else None
    hardware, problem = facts.hardware, detect.group_problem(gpus, facts.host.gpus)
    requested = f"hardware={facts.group} was requested"
    if problem:
        reading, remedy = problem
    else:
        group = detect.group_of(gpus)
        reading = detect.detection_line(gpus, group).removeprefix("hardware=auto: ")
        remedy = f"hardware={group}, or hardware=auto"
    # Accept GPUs that no group describes. The user chose the closest group, and products with the
    # same gfx target differ only in size.
    if (
        hardware is not None
        and hardware.vendor != Vendor.none
        and all(
            gpu.gfx not in (hardware.gfx, "unknown") and (gpu.group or gpu.partition_of)
            for gpu in gpus
        )
    ):
        return fail(
            f"{reading}, but {requested}, which has code for {hardware.gfx} only",
            "hardware=auto, or the group of this machine's GPU",
        )
    if problem and hardware is not None and all(facts.group in gpu.may_be for gpu in gpus):
        return passed(f"{reading}; {requested}")
    if problem and (hardware is None or any(gpu.partition_of for gpu in gpus)):
        return fail(reading, remedy)
    if problem or (hardware is not None and facts.group != group):
        return warn(f"{reading}, but {requested}", remedy)
    if unreadable:
        return unknown(f"{reading}; {unreadable[0]}", unreadable[1])
    return passed(reading)


def unreadable_nodes(facts: Facts) -> tuple[str, str] | None:
    """Return the problem of the kernel's GPU nodes, and its remedy; None if they are readable."""
    if nodes := kfd.unidentified_nodes(facts.root):
        names = f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))}"
        return (
            f"the properties of {names} in {TOPOLOGY} cannot be read",
            f"cat /{TOPOLOGY}/nodes/{nodes[0]}/properties; if the file is empty, sudo dmesg | "
            "grep -i amdgpu",
        )
    if is_folder(facts.root / "sys/class/kfd") and not folders(facts.root / TOPOLOGY / "nodes"):
        return (
            f"{TOPOLOGY} has no nodes, although every CPU has one",
            f"copy all of it: cp -rL /{TOPOLOGY} DIR/{TOPOLOGY}",
        )
    return None


def gpus_found(facts: Facts) -> Finding | None:
    """Find cards on the PCI bus that the driver hides because they failed to start or were lost."""
    cards = facts.amd_cards() if facts.is_amd else []
    if not cards:
        return None
    shown = {gpu.pci_address for gpu in (*facts.gpus, *facts.host.withheld)}
    hidden = [card for card in cards if card not in shown]
    # The hidden cards are GPUs that this container may not open.
    if len(hidden) <= sum(gpu.pci_address is None for gpu in facts.host.withheld):
        return passed(f"all {len(cards)} on the bus are in the topology")
    reading = f"{', '.join(hidden)} on the bus, but not in /sys/class/kfd"
    remedy = f"sudo dmesg | grep {hidden[0]}, then reboot; if it is too old for ROCm, do nothing"
    return fail_or_warn(not facts.gpus, reading, remedy)


def kfd_node(facts: Facts) -> Finding | None:
    if missing_path := _missing_from_copy(facts):
        return unknown(f"this tree has no {missing_path}", NOT_COPIED)
    if KFD not in facts.host.device_nodes:
        devices = f"--device {KFD} --device /dev/dri/renderD128"
        return fail(f"{KFD} is missing", facts.start_with(devices, "sudo modprobe amdgpu"))
    if facts.may_open(KFD):
        return passed(f"uid {facts.host.uid} may open {KFD}")
    return fail(f"uid {facts.host.uid} may not open {KFD}", _join_groups(facts, [KFD]))


def render_nodes(facts: Facts) -> Finding | None:
    """Check the render node of each GPU. A container may have only some of them."""
    gpus = facts.gpus if facts.only is not None else (*facts.gpus, *facts.host.withheld)
    minors = [gpu.render_minor for gpu in gpus if gpu.is_amd]
    nodes = list(dict.fromkeys(f"/dev/dri/renderD{n}" for n in minors if n is not None))
    if not nodes:
        return None
    if missing_path := _missing_from_copy(facts):
        return unknown(f"this tree has no {missing_path}", NOT_COPIED)
    uid = facts.host.uid
    missing = [node for node in nodes if node not in facts.host.device_nodes]
    if closed := [node for node in nodes if node not in missing and not facts.may_open(node)]:
        return fail(f"uid {uid} may not open {first_few(closed, 3)}", _join_groups(facts, closed))
    if not missing:
        return passed(f"uid {uid} may open all {len(nodes)}")
    all_missing = len(missing) == len(nodes)
    if facts.in_container and not all_missing:
        opened = len(nodes) - len(missing)
        return passed(f"uid {uid} may open {opened}; {len(missing)} are not in this container")
    reading = f"{len(missing)} of {len(nodes)} GPUs have no node: {first_few(missing, 3)}"
    devices = " ".join(f"--device {node}" for node in missing[:8])
    remedy = facts.start_with(devices, "see dmesg | grep -i amdgpu")
    return fail_or_warn(all_missing, reading, remedy)


def _missing_from_copy(facts: Facts) -> str | None:
    """Return a path that a copied tree needs to show device permissions but does not have."""
    paths = ("dev", "proc/self/status")
    return next((path for path in paths if status_of(facts.root / path) is None), None)


def _join_groups(facts: Facts, nodes: list[str]) -> str:
    """Return commands that give the user access to device nodes.

    A container may not know the name of a host's group, so use its number there.
    """
    gids = sorted({gid for node in nodes if (gid := facts.host.device_nodes[node]) is not None})
    if 0 in gids and not facts.in_container:  # udev has not changed the group yet
        return (
            f"on the host: sudo chgrp render {' '.join(nodes)}; sudo usermod -aG render,video "
            "$USER, then log in again"
        )
    names = {number: name for name, number in facts.host.gids.items()}
    groups = ",".join(names.get(gid, str(gid)) for gid in gids)
    options = " ".join(f"--group-add {gid}" for gid in gids)
    return facts.start_with(options, f"sudo usermod -aG {groups} $USER, then log in again")
