"""What this host is: its GPUs from sysfs (no ROCm tools, no torch), its cores, and the environment the user brings.

`sysroot` stands for `/`, so that trees copied from other machines serve as input.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from launch.errors import HostError
from launch.machine import kfd, masks, nvidia
from launch.machine.gpu import GIB
from launch.machine.gpu import Gpu as Gpu
from launch.machine.sysfs import as_number, status_of, text
from launch.schema import Hardware
from launch.schema.enums import Vendor

FITS = 0.97  # of the file's figure: it is nominal, and firmware keeps a little
FITS_SHARED = 0.90  # the same where the system lives on it too


@dataclass(frozen=True)
class Host:
    """Facts a plan may depend on. `environ` holds the user's own values of variables that a plan may set."""

    python: str
    num_cores: int
    gpus: tuple[Gpu, ...] = ()  # those that the caller may use, as torch would count them
    withheld: tuple[Gpu, ...] = ()  # those that are here, and whose device nodes this container was not given
    environ: dict[str, str] = field(default_factory=dict)
    cwd: str = "."
    home: str = "/root"
    uid: int = 0
    gid: int = 0
    gids: dict[str, int] = field(default_factory=dict)  # of the groups video and render, where they exist
    member_of: tuple[int, ...] = ()  # gids of the caller's groups
    # Those that a container of ours may be given, with the group one must be in to open each; None where anybody may.
    device_nodes: dict[str, int | None] = field(default_factory=dict)
    selinux: bool = False  # enforcing
    listening: frozenset[int] = frozenset()  # TCP ports that are taken
    sysroot: str = "/"  # where all of this was read

    def gpus_of(self, vendor: Vendor) -> tuple[Gpu, ...]:
        """Those that a mask of this maker counts, in its order."""
        return tuple(gpu for gpu in self.gpus if gpu.gfx.startswith("gfx") == (vendor == Vendor.amd))

    def free_port(self, wanted: int) -> int:
        """The first from `wanted` on that nobody listens on."""
        return next(port for port in range(wanted, 65536) if port not in self.listening)


def group_of(found: tuple[Gpu, ...], counted: tuple[Gpu, ...] = ()) -> str:
    """The conf/hardware group of these GPUs, of those that may be used where any may; `cpu` where there are none. Raises HostError rather
    than guess."""
    wrong = undecided(found, counted)
    if wrong:
        raise HostError(f"hardware=auto: this machine has {wrong[0]}; {wrong[1]}.")
    return next((gpu.group for gpu in _chosen(found) if gpu.group), "cpu")


def undecided(found: tuple[Gpu, ...], counted: tuple[Gpu, ...] = ()) -> tuple[str, str] | None:
    """Where no group follows from these GPUs: what they are, and what to do. `counted`: all that a mask counts, where `found` is masked."""
    chosen = _chosen(found)
    kinds = Counter(gpu.group or describe(gpu) for gpu in chosen)
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if len(kinds) > 1:
        groups = dict.fromkeys(gpu.group for gpu in chosen if gpu.group)
        options = ", or ".join(_shown_alone(group, chosen, counted or found) for group in groups)
        remedy = f"name the group and show only its GPUs: {options}"
        return listed, remedy if options else "no group of conf/hardware describes any: name one that is near"
    if not chosen or chosen[0].group is not None:
        return None
    if chosen[0].may_be:
        return listed, f"several groups fit it equally: name one, hardware={' or hardware='.join(chosen[0].may_be)}"
    return listed, _partition_remedy(chosen) if chosen[0].partition_of else "no group of conf/hardware describes it: name one that is near"


def _shown_alone(group: str, chosen: list[Gpu], counted: tuple[Gpu, ...]) -> str:
    """The group, with the mask that leaves its GPUs."""
    is_amd = any(gpu.group == group and gpu.gfx.startswith("gfx") for gpu in chosen)
    same_maker = [gpu for gpu in _chosen(counted) if gpu.gfx.startswith("gfx") == is_amd]
    indices = ",".join(str(index) for index, gpu in enumerate(same_maker) if gpu.group == group and gpu in chosen)
    return f"hardware={group} with {(masks.AMD if is_amd else masks.NVIDIA)[0]}={indices}"


def _chosen(found: tuple[Gpu, ...]) -> list[Gpu]:
    return [gpu for gpu in found if gpu.usable] or list(found)


def is_smaller(gpu: Gpu, hardware: Hardware) -> bool:
    """Whether it is a GPU of this group, with less memory than the group says: a card of another size, a GTT left at half."""
    share = FITS_SHARED if hardware.unified_memory else FITS
    of_group = hardware.name in (gpu.group, gpu.partition_of)
    return of_group and gpu.memory_gb is not None and gpu.memory_gb < share * hardware.memory_gb * GIB


def describe(gpu: Gpu) -> str:
    """Product, target, size, in a few words."""
    memory = "memory unknown" if gpu.memory_gb is None else f"{gpu.memory_gb:.0f} GB"
    units = "compute units unknown" if gpu.compute_units is None else f"{gpu.compute_units} CUs"
    return f"{'unknown GPU' if gpu.product == 'unknown' else gpu.product} ({gpu.gfx}, {units}, {memory})"


def _partition_remedy(found: list[Gpu]) -> str:
    gpu = found[0]
    memory = "<GiB of one partition>" if gpu.memory_gb is None else f"{gpu.memory_gb / GIB:.0f}"
    return (
        f"hardware={gpu.partition_of} is a whole GPU, not a partition. Make them whole (nothing may run on them): sudo amd-smi set "
        f"--gpu all --compute-partition SPX. Or keep them and say what one has: hardware={gpu.partition_of} hardware.memory_gb={memory} "
        f"hardware.compute_units={gpu.compute_units} hardware.gpus_per_node={len(found)} "
        f"hardware.host.compute_partition={gpu.compute_partition} (speed is then overestimated)"
    )


def found_line(found: tuple[Gpu, ...], group: str) -> str:
    """What hardware=auto found, and the group that follows."""
    if not found:
        return f"hardware=auto: no GPU in /sys/class/kfd nor in /proc/driver/nvidia (or none that your mask leaves): hardware={group}"
    usable = _chosen(found)
    kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(describe(gpu) for gpu in usable).items())
    withheld = len(found) - len(usable)
    return f"hardware=auto: {kinds}{f', and {withheld} that were not given to this container' if withheld else ''}: hardware={group}"


def gpus(sysroot: str = "/") -> tuple[Gpu, ...]:
    """AMD GPUs of the kernel's topology, then NVIDIA's of its driver; also those that the caller may not use."""
    return (*kfd.gpus(Path(sysroot)), *nvidia.gpus(Path(sysroot)))


def host(python: str, sysroot: str = "/") -> Host:
    """Facts of this machine. `num_cores` are those this process may use."""
    found = gpus(sysroot)
    return Host(
        python=python,
        num_cores=len(os.sched_getaffinity(0)),
        gpus=tuple(gpu for gpu in found if gpu.usable),
        withheld=tuple(gpu for gpu in found if not gpu.usable),
        environ=dict(os.environ),
        cwd=os.getcwd(),
        home=_home(),
        uid=os.getuid(),
        gid=os.getgid(),
        gids=_gids(Path(sysroot) / "etc/group"),
        member_of=(os.getgid(), *os.getgroups()),
        device_nodes=_device_nodes(Path(sysroot)),
        selinux=text(Path(sysroot) / "sys/fs/selinux/enforce") == "1",
        listening=_listening(Path(sysroot)),
        sysroot=sysroot,
    )


def _listening(root: Path) -> frozenset[int]:
    """Local ports of sockets in state 0A (LISTEN), of IPv4 and IPv6."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in (text(root / "proc/net" / name) or "").splitlines()[1:]]
    ports = [row[1].rpartition(":")[2] for row in rows if len(row) > 3 and row[3] == "0A"]
    return frozenset(int(port, 16) for port in ports if re.fullmatch("[0-9A-Fa-f]{4}", port))


def _gids(file: Path) -> dict[str, int]:
    """Of video and render: the numbers differ from one distribution to the next, and from the image's."""
    rows = [line.split(":") for line in (text(file) or "").splitlines()]
    found = {row[0]: as_number(row[2]) for row in rows if row[0] in ("video", "render") and len(row) > 2}
    return {name: number for name, number in found.items() if number is not None}


def _device_nodes(root: Path) -> dict[str, int | None]:
    paths = [*root.glob("dev/kfd"), *sorted(root.glob("dev/dri/renderD*")), *root.glob("dev/infiniband")]
    found = {path: status for path in paths if (status := status_of(path))}  # a link may lead nowhere, a device go away
    return {"/" + str(path.relative_to(root)): _group(status) for path, status in found.items()}


def _group(found: os.stat_result) -> int | None:
    return None if found.st_mode & 0o006 == 0o006 or stat.S_ISDIR(found.st_mode) else found.st_gid


def _home() -> str:
    """Of the caller; the working directory of one who has none."""
    try:
        return str(Path.home().absolute())
    except RuntimeError:
        return os.getcwd()
