"""What this host is: its GPUs from sysfs (no ROCm tools, no torch), its cores, and the environment the user brings.

`sysroot` stands for `/`, so that trees copied from other machines serve as input.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from launch.errors import HostError

# (gfx target, compute units) -> group; memory in GB decides where two products share a chip.
# Source: AMD's product pages, as listed in docs/hardware/.
GROUPS = {
    ("gfx906", 60): "mi50",
    ("gfx906", 64): "mi60",
    ("gfx908", 120): "mi100",
    ("gfx90a", 104): "mi210",
    ("gfx90a", 110): "mi250x",
    ("gfx942", 228): "mi300a",
    ("gfx942", 304): "mi300x",
    ("gfx950", 256): "mi350x",
    ("gfx1100", 96): "rx7900xtx",
    ("gfx1201", 64): "rx9070xt",
    ("gfx1151", 40): "strix_halo",
}
BIGGER = {"mi300x": (220, "mi325x"), "rx9070xt": (24, "r9700")}  # group -> (GB from which it is the other, the other)
PCI_DEVICE = {0x75A3: "mi355x"}  # MI350X and MI355X differ in clocks and power only (pci.ids)
NVIDIA = {"H100": "h100", "H200": "h200"}


@dataclass(frozen=True)
class Gpu:
    product: str
    gfx: str
    compute_units: int
    memory_gb: float
    group: str | None  # of conf/hardware, where one fits
    render_minor: int | None = None  # N of /dev/dri/renderDN


@dataclass(frozen=True)
class Host:
    """Facts a plan may depend on. `environ` holds the user's own values of variables that a plan may set."""

    python: str
    num_cores: int
    gpus: tuple[Gpu, ...] = ()
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

    def free_port(self, wanted: int) -> int:
        """The first from `wanted` on that nobody listens on."""
        return next(port for port in range(wanted, 65536) if port not in self.listening)


def hardware_group(sysroot: str = "/") -> str:
    """The conf/hardware group of this machine's GPUs; `cpu` where there is none. Raises HostError rather than guess."""
    found = gpus(sysroot)
    kinds = Counter(gpu.group or f"an unknown GPU ({gpu.product}, {gpu.gfx}, {gpu.compute_units} CUs)" for gpu in found)
    if not kinds:
        return "cpu"
    group = found[0].group
    if len(kinds) > 1 or group is None:
        listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        raise HostError(f"hardware=auto: this machine has {listed}; name the group to use, for example hardware=mi300x.")
    return group


def gpus(sysroot: str = "/") -> tuple[Gpu, ...]:
    """AMD GPUs of the kernel's topology, or else NVIDIA's of its driver."""
    return tuple(_amd(Path(sysroot))) or tuple(_nvidia(Path(sysroot)))


def _amd(root: Path) -> list[Gpu]:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    folders = sorted(nodes.iterdir(), key=lambda p: int(p.name)) if nodes.is_dir() else []
    found = []
    for folder in folders:
        values = _properties(folder / "properties")
        version = values.get("gfx_target_version", 0)
        if version == 0:  # a CPU
            continue
        memory_gb = sum(_properties(bank).get("size_in_bytes", 0) for bank in folder.glob("mem_banks/*/properties")) / 1e9
        gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        units = values.get("simd_count", 0) // (values.get("simd_per_cu", 0) or 4)
        group = PCI_DEVICE.get(values.get("device_id", 0), GROUPS.get((gfx, units)))
        if group in BIGGER and memory_gb >= BIGGER[group][0]:
            group = BIGGER[group][1]
        found.append(Gpu("AMD GPU", gfx, units, memory_gb, group, values.get("drm_render_minor")))
    return found


def _properties(file: Path) -> dict[str, int]:
    """`name value` lines; what is not a number is left out."""
    pairs = [line.split() for line in (text(file) or "").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def text(file: str | Path) -> str | None:
    """What stands in a file, None where there is none or nothing."""
    try:
        return Path(file).read_text().strip() or None
    except OSError:
        return None


def _nvidia(root: Path) -> list[Gpu]:
    found = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = next((line.split(":", 1)[1].strip() for line in file.read_text().splitlines() if line.startswith("Model:")), "unknown")
        group = next((name for key, name in NVIDIA.items() if key in model), None)
        found.append(Gpu(model, "sm_90" if group else "unknown", 0, 0.0, group))
    return found


def host(python: str, sysroot: str = "/") -> Host:
    """Facts of this machine. `num_cores` are those this process may use."""
    return Host(
        python=python,
        num_cores=len(os.sched_getaffinity(0)),
        gpus=gpus(sysroot),
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
    )


def _listening(root: Path) -> frozenset[int]:
    """Local ports of sockets in state 0A (LISTEN), of IPv4 and IPv6."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in (text(root / "proc/net" / name) or "").splitlines()[1:]]
    return frozenset(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A")


def _gids(file: Path) -> dict[str, int]:
    """Of video and render: the numbers differ from one distribution to the next, and from the image's."""
    rows = [line.split(":") for line in (text(file) or "").splitlines()]
    return {row[0]: int(row[2]) for row in rows if row[0] in ("video", "render") and len(row) > 2 and row[2].isdigit()}


def _device_nodes(root: Path) -> dict[str, int | None]:
    found = [*root.glob("dev/kfd"), *sorted(root.glob("dev/dri/renderD*")), *root.glob("dev/infiniband")]
    return {"/" + str(path.relative_to(root)): _group(path.stat()) for path in found}


def _group(found: os.stat_result) -> int | None:
    return None if found.st_mode & 0o006 == 0o006 or stat.S_ISDIR(found.st_mode) else found.st_gid


def _home() -> str:
    """Of the caller; the working directory of one who has none."""
    try:
        return str(Path.home().absolute())
    except RuntimeError:
        return os.getcwd()
