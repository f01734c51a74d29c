"""Detect this host's GPUs (without ROCm tools or torch), cores, device nodes and environment.

`sysroot` replaces `/`, so that files copied from another machine can be read.
"""

import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launch.core.errors import HostError
from launch.machine import kfd, masks, nvidia
from launch.machine.gpu import GIB
from launch.machine.gpu import Gpu as Gpu
from launch.machine.sysfs import as_number, is_folder, status_of, text
from launch.schema import Hardware
from launch.schema.enums import Vendor

SIMILAR = "Use: hardware=<a similar group>"
# Minimum share of hardware.memory_gb that a GPU shows, because firmware reserves a little.
MIN_SHARE = 0.97
MIN_SHARE_UNIFIED = 0.90  # the same for memory that the system uses too
DKMS, IN_TREE = "amdgpu-dkms", "the kernel's own amdgpu"


@dataclass(frozen=True)
class Host:
    """The facts about this host that a plan may depend on."""

    python: str
    num_cores: int
    gpus: tuple[Gpu, ...] = ()  # GPUs that the caller may use, in torch's order
    withheld: tuple[Gpu, ...] = ()  # GPUs whose device nodes this container did not get
    environ: dict[str, str] = field(default_factory=dict)  # of the launcher
    cwd: str = "."
    home: str = "/root"
    uid: int = 0
    gid: int = 0
    gids: dict[str, int] = field(default_factory=dict)  # of the groups video and render, if any
    member_of: tuple[int, ...] = ()  # gids of the caller's groups
    # Device nodes that a container may get, with the gid that may open each; None if anybody may.
    device_nodes: dict[str, int | None] = field(default_factory=dict)
    amdgpu: str | None = None  # the driver: DKMS, IN_TREE, or None if it is not loaded
    selinux: bool = False  # whether SELinux is enforcing
    listening: frozenset[int] = frozenset()  # TCP ports in use
    sysroot: str = "/"  # folder that the facts were read from
    # free bytes on the disk of a directory, which may be missing; None for another machine
    disk_free: Callable[[str], int] | None = None

    def gpus_of(self, vendor: Vendor) -> tuple[Gpu, ...]:
        """Return the vendor's GPUs in the order of its mask."""
        is_amd = vendor == Vendor.amd
        return tuple(gpu for gpu in self.gpus if gpu.is_amd == is_amd)

    def free_port(self, first: int) -> int:
        """Return the first free port at or above `first`."""
        return next(port for port in range(first, 65536) if port not in self.listening)


def group_of(gpus: tuple[Gpu, ...], counted: tuple[Gpu, ...] = ()) -> str:
    """Return the conf/hardware group of these GPUs; `cpu` if there are none.

    Unusable GPUs are ignored unless all are unusable. If `gpus` is masked, `counted` has all GPUs
    that a mask can number. Raises HostError if the GPUs do not determine one group.
    """
    problem = group_problem(gpus, counted)
    if problem:
        raise HostError(f"hardware=auto: this machine has {problem[0]}. {problem[1]}.")
    return next((gpu.group for gpu in _usable_or_all(gpus) if gpu.group), "cpu")


def group_problem(gpus: tuple[Gpu, ...], counted: tuple[Gpu, ...] = ()) -> tuple[str, str] | None:
    """Return the GPUs in words and a remedy, if they do not determine one group; else None.

    See group_of for the arguments.
    """
    candidates = _usable_or_all(gpus)
    kinds = Counter(gpu.group or describe(gpu) for gpu in candidates)
    kinds_text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if len(kinds) > 1:
        groups = dict.fromkeys(gpu.group for gpu in candidates if gpu.group)
        options = []
        for group in groups:
            # A mask numbers the GPUs of one vendor.
            is_amd = any(gpu.group == group and gpu.is_amd for gpu in candidates)
            same_vendor = [g for g in _usable_or_all(counted or gpus) if g.is_amd == is_amd]
            indices = [
                str(i) for i, g in enumerate(same_vendor) if g.group == group and g in candidates
            ]
            mask = (masks.AMD if is_amd else masks.NVIDIA)[0]
            options.append(f"hardware={group} with {mask}={','.join(indices)}")
        if options:
            return kinds_text, f"Choose a group and show only its GPUs: {', or '.join(options)}"
        return kinds_text, f"None of them has a group in conf/hardware. {SIMILAR}"
    if not candidates or candidates[0].group is not None:
        return None
    if candidates[0].may_be:
        options = [f"hardware={group}" for group in candidates[0].may_be]
        return kinds_text, f"Several groups match it equally well. Use: {' or '.join(options)}"
    if candidates[0].partition_of:
        return kinds_text, partition_remedy(candidates)
    return kinds_text, f"It has no group in conf/hardware. {SIMILAR}"


def _usable_or_all(gpus: tuple[Gpu, ...]) -> list[Gpu]:
    return [gpu for gpu in gpus if gpu.usable] or list(gpus)


def is_of(gpu: Gpu, hardware: Hardware) -> bool:
    """Return whether a GPU, or the one it is a partition of, is this hardware in any size."""
    return hardware.name in (gpu.group, gpu.partition_of) or hardware.product == gpu.product


def is_smaller(gpu: Gpu, hardware: Hardware) -> bool:
    """Return whether a GPU has less memory than hardware.memory_gb, for example a small GTT."""
    if gpu.memory_gb is None or not is_of(gpu, hardware):
        return False
    share = MIN_SHARE_UNIFIED if hardware.unified_memory else MIN_SHARE
    return gpu.memory_gb < share * hardware.memory_gb * GIB


def describe(gpu: Gpu) -> str:
    """Return a GPU's product, compiler target, compute units and memory."""
    memory = "memory unknown" if gpu.memory_gb is None else f"{gpu.memory_gb:.0f} GB"
    units = "compute units unknown" if gpu.compute_units is None else f"{gpu.compute_units} CUs"
    name = "unknown GPU" if gpu.product == "unknown" else gpu.product
    gfx = gpu.gfx
    if gfx == "unknown":  # then the PCI id is all that identifies the product
        gfx = f"gfx target unknown, PCI id {gpu.device_id or 'unknown'}"
    return f"{name} ({gfx}, {units}, {memory})"


def partition_remedy(gpus: list[Gpu]) -> str:
    """Return how to merge partitions, and the overrides that describe one of them instead."""
    gpu = gpus[0]
    memory = "<GiB of one partition>" if gpu.memory_gb is None else f"{gpu.memory_gb / GIB:.0f}"
    return (
        f"hardware={gpu.partition_of} describes a complete GPU, not a partition. To merge the "
        "partitions, stop all programs on them and run: sudo amd-smi set --gpu all "
        "--compute-partition SPX. To use the partitions, describe one of them: "
        f"hardware={gpu.partition_of} hardware.memory_gb={memory} "
        f"hardware.compute_units={gpu.compute_units} hardware.gpus_per_node={len(gpus)} "
        f"hardware.host.compute_partition={gpu.compute_partition} (the predicted speed is then "
        "too high)"
    )


def detection_line(gpus: tuple[Gpu, ...], group: str) -> str:
    """Return a line with the detected GPUs and the group that hardware=auto chose for them."""
    usable = _usable_or_all(gpus)
    kinds = [f"{count} x {kind}" for kind, count in Counter(map(describe, usable)).items()]
    if not kinds:
        kinds = ["no GPU in /sys/class/kfd or /proc/driver/nvidia, or your mask hides all"]
    withheld = len(gpus) - len(usable)
    others = f", and {withheld} that this container did not get" if withheld else ""
    return f"hardware=auto: {', '.join(kinds)}{others}: hardware={group}"


def gpus(sysroot: str = "/") -> tuple[Gpu, ...]:
    """Return all GPUs, usable or not: AMD's from the kernel's topology, then NVIDIA's."""
    return (*kfd.gpus(Path(sysroot)), *nvidia.gpus(Path(sysroot)))


def host(python: str, sysroot: str = "/") -> Host:
    """Return the facts about this host; `python` is the interpreter that its ranks will run."""
    detected, root = gpus(sysroot), Path(sysroot)
    return Host(
        python=python,
        num_cores=len(os.sched_getaffinity(0)),  # cores that this process may use
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
        amdgpu=amdgpu(root / "sys/module/amdgpu"),
        selinux=text(root / "sys/fs/selinux/enforce") == "1",
        listening=listening_ports(root),
        sysroot=sysroot,
        disk_free=_disk_free if root == Path("/") else None,
    )


def _disk_free(folder: str) -> int:
    folders = (Path(folder), *Path(folder).absolute().parents)
    return shutil.disk_usage(next(filter(Path.is_dir, folders))).free


def amdgpu(module: Path) -> str | None:
    """Return which amdgpu driver is loaded. Only AMD's package gives it a version."""
    if not is_folder(module):
        return None
    return DKMS if text(module / "version") else IN_TREE


def listening_ports(root: Path) -> frozenset[int]:
    """Return the local TCP ports, IPv4 and IPv6, of sockets in state 0A (LISTEN)."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in (text(root / "proc/net" / name) or "").splitlines()[1:]
    ]
    ports = [row[1].rpartition(":")[2] for row in rows if len(row) > 3 and row[3] == "0A"]
    return frozenset(int(port, 16) for port in ports if re.fullmatch("[0-9A-Fa-f]{4}", port))


def group_ids(file: Path) -> dict[str, int]:
    """Return the gids of the groups video and render, which differ between distributions."""
    rows = [line.split(":") for line in (text(file) or "").splitlines()]
    rows = [row for row in rows if row[0] in ("video", "render") and len(row) > 2]
    gids = {row[0]: as_number(row[2]) for row in rows}
    return {name: gid for name, gid in gids.items() if gid is not None}


def device_nodes(root: Path) -> dict[str, int | None]:
    """Return the device nodes of GPUs and networks, each with the gid that may open it.

    The gid is None if anybody may open the node.
    """
    paths = [
        *root.glob("dev/kfd"),
        *sorted(root.glob("dev/dri/renderD*")),
        *root.glob("dev/infiniband"),
    ]
    # Skip dangling links and devices that disappear meanwhile.
    nodes = {path: status for path in paths if (status := status_of(path))}
    gids = {}
    for path, status in nodes.items():
        is_open = status.st_mode & 0o006 == 0o006 or stat.S_ISDIR(status.st_mode)
        gids["/" + str(path.relative_to(root))] = None if is_open else status.st_gid
    return gids
