"""Detect this host: GPUs from sysfs (no ROCm tools, no torch), cores, the user's environment.

`sysroot` replaces `/`, so that trees copied from other machines can be read.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from launch.core.errors import HostError
from launch.machine import kfd, masks, nvidia
from launch.machine.gpu import GIB
from launch.machine.gpu import Gpu as Gpu
from launch.machine.sysfs import as_number, status_of, text
from launch.schema import Hardware
from launch.schema.enums import Vendor

FITS = 0.97  # share of the file's nominal figure, since firmware keeps a little
FITS_SHARED = 0.90  # the same if the system uses the memory too


@dataclass(frozen=True)
class Host:
    """Facts that a plan may depend on.

    `environ` holds the user's own values of variables that a plan may set.
    """

    python: str
    num_cores: int
    gpus: tuple[Gpu, ...] = ()  # those that the caller may use, in torch's order
    withheld: tuple[Gpu, ...] = ()  # GPUs whose device nodes this container lacks
    environ: dict[str, str] = field(default_factory=dict)
    cwd: str = "."
    home: str = "/root"
    uid: int = 0
    gid: int = 0
    gids: dict[str, int] = field(default_factory=dict)  # of groups video and render, if any
    member_of: tuple[int, ...] = ()  # gids of the caller's groups
    # Device nodes that a container may get, with the gid that may open each; None if anybody may.
    device_nodes: dict[str, int | None] = field(default_factory=dict)
    selinux: bool = False  # whether SELinux is enforcing
    listening: frozenset[int] = frozenset()  # TCP ports that are taken
    sysroot: str = "/"  # where all of this was read

    def gpus_of(self, vendor: Vendor) -> tuple[Gpu, ...]:
        """Return the GPUs that a mask of this vendor counts, in its order."""
        is_amd = vendor == Vendor.amd
        return tuple(gpu for gpu in self.gpus if gpu.gfx.startswith("gfx") == is_amd)

    def free_port(self, first: int) -> int:
        """Return the first free port at or above `first`."""
        return next(port for port in range(first, 65536) if port not in self.listening)


def group_of(gpus: tuple[Gpu, ...], counted: tuple[Gpu, ...] = ()) -> str:
    """Return the conf/hardware group of the usable GPUs, or of all if none is; `cpu` without GPUs.

    Raises HostError rather than guess.
    """
    fault = undecided(gpus, counted)
    if fault:
        raise HostError(f"hardware=auto: this machine has {fault[0]}; {fault[1]}.")
    return next((gpu.group for gpu in _chosen(gpus) if gpu.group), "cpu")


def undecided(gpus: tuple[Gpu, ...], counted: tuple[Gpu, ...] = ()) -> tuple[str, str] | None:
    """Return a description of these GPUs and a remedy, if no group follows from them.

    `counted` are all GPUs that a mask counts, if `gpus` is masked.
    """
    chosen = _chosen(gpus)
    kinds = Counter(gpu.group or describe(gpu) for gpu in chosen)
    kinds_text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if len(kinds) > 1:
        groups = dict.fromkeys(gpu.group for gpu in chosen if gpu.group)
        options = []
        for group in groups:
            # A mask counts the GPUs of one vendor.
            is_amd = any(gpu.group == group and gpu.gfx.startswith("gfx") for gpu in chosen)
            same = [g for g in _chosen(counted or gpus) if g.gfx.startswith("gfx") == is_amd]
            indices = [str(i) for i, g in enumerate(same) if g.group == group and g in chosen]
            mask = (masks.AMD if is_amd else masks.NVIDIA)[0]
            options.append(f"hardware={group} with {mask}={','.join(indices)}")
        if options:
            return kinds_text, f"name the group and show only its GPUs: {', or '.join(options)}"
        return kinds_text, "no group of conf/hardware describes any: name a similar one"
    if not chosen or chosen[0].group is not None:
        return None
    if chosen[0].may_be:
        names = " or hardware=".join(chosen[0].may_be)
        return kinds_text, f"several groups fit it equally: name one, hardware={names}"
    if chosen[0].partition_of:
        return kinds_text, partition_remedy(chosen)
    return kinds_text, "no group of conf/hardware describes it: name a similar one"


def _chosen(gpus: tuple[Gpu, ...]) -> list[Gpu]:
    return [gpu for gpu in gpus if gpu.usable] or list(gpus)


def is_smaller(gpu: Gpu, hardware: Hardware) -> bool:
    """Return whether a GPU has less memory than its group states (such as a small GTT)."""
    if gpu.memory_gb is None or hardware.name not in (gpu.group, gpu.partition_of):
        return False
    share = FITS_SHARED if hardware.unified_memory else FITS
    return gpu.memory_gb < share * hardware.memory_gb * GIB


def describe(gpu: Gpu) -> str:
    """Return a GPU's product, target and size in a few words."""
    memory = "memory unknown" if gpu.memory_gb is None else f"{gpu.memory_gb:.0f} GB"
    units = "compute units unknown" if gpu.compute_units is None else f"{gpu.compute_units} CUs"
    name = "unknown GPU" if gpu.product == "unknown" else gpu.product
    return f"{name} ({gpu.gfx}, {units}, {memory})"


def partition_remedy(gpus: list[Gpu]) -> str:
    gpu = gpus[0]
    memory = "<GiB of one partition>" if gpu.memory_gb is None else f"{gpu.memory_gb / GIB:.0f}"
    return (
        f"hardware={gpu.partition_of} is a whole GPU, not a partition. Merge its partitions while "
        "nothing runs on them: sudo amd-smi set --gpu all --compute-partition SPX. Or keep them "
        "and describe one partition: "
        f"hardware={gpu.partition_of} hardware.memory_gb={memory} "
        f"hardware.compute_units={gpu.compute_units} hardware.gpus_per_node={len(gpus)} "
        f"hardware.host.compute_partition={gpu.compute_partition} (speed is then overestimated)"
    )


def found_line(gpus: tuple[Gpu, ...], group: str) -> str:
    """Return a line with what hardware=auto found and the group that follows."""
    usable = _chosen(gpus)
    kinds = [f"{count} x {kind}" for kind, count in Counter(map(describe, usable)).items()]
    if not kinds:
        kinds = ["no GPU in /sys/class/kfd nor /proc/driver/nvidia (or your mask hides all)"]
    withheld = len(gpus) - len(usable)
    others = f", and {withheld} that were not passed to this container" if withheld else ""
    return f"hardware=auto: {', '.join(kinds)}{others}: hardware={group}"


def gpus(sysroot: str = "/") -> tuple[Gpu, ...]:
    """Return AMD GPUs from the kernel's topology, then NVIDIA's from its driver, usable or not."""
    return (*kfd.gpus(Path(sysroot)), *nvidia.gpus(Path(sysroot)))


def host(python: str, sysroot: str = "/") -> Host:
    """Collect the facts of this machine. `num_cores` counts the cores that this process may use."""
    detected, root = gpus(sysroot), Path(sysroot)
    return Host(
        python=python,
        num_cores=len(os.sched_getaffinity(0)),
        gpus=tuple(gpu for gpu in detected if gpu.usable),
        withheld=tuple(gpu for gpu in detected if not gpu.usable),
        environ=dict(os.environ),
        cwd=os.getcwd(),
        home=os.path.abspath(os.path.expanduser("~")),
        uid=os.getuid(),
        gid=os.getgid(),
        gids=group_ids(root / "etc/group"),
        member_of=(os.getgid(), *os.getgroups()),
        device_nodes=device_nodes(root),
        selinux=text(root / "sys/fs/selinux/enforce") == "1",
        listening=listening_ports(root),
        sysroot=sysroot,
    )


def listening_ports(root: Path) -> frozenset[int]:
    """Return the local ports of sockets in state 0A (LISTEN), of IPv4 and IPv6."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in (text(root / "proc/net" / name) or "").splitlines()[1:]
    ]
    ports = [row[1].rpartition(":")[2] for row in rows if len(row) > 3 and row[3] == "0A"]
    return frozenset(int(port, 16) for port in ports if re.fullmatch("[0-9A-Fa-f]{4}", port))


def group_ids(file: Path) -> dict[str, int]:
    """Return the gids of video and render, which differ between distributions and images."""
    rows = [line.split(":") for line in (text(file) or "").splitlines()]
    rows = [row for row in rows if row[0] in ("video", "render") and len(row) > 2]
    gids = {row[0]: as_number(row[2]) for row in rows}
    return {name: gid for name, gid in gids.items() if gid is not None}


def device_nodes(root: Path) -> dict[str, int | None]:
    """Return the device nodes of GPUs and networks, with the gid that may open each, if any."""
    paths = [
        *root.glob("dev/kfd"),
        *sorted(root.glob("dev/dri/renderD*")),
        *root.glob("dev/infiniband"),
    ]
    # A link may lead nowhere, and a device may disappear.
    nodes = {path: status for path in paths if (status := status_of(path))}
    gids = {}
    for path, status in nodes.items():
        is_open = status.st_mode & 0o006 == 0o006 or stat.S_ISDIR(status.st_mode)
        gids["/" + str(path.relative_to(root))] = None if is_open else status.st_gid
    return gids
