"""What checks read: files below a root that stands for `/`, the launcher's own facts, and the few answers that no file holds."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.checks.measured import Outcome
from launch.machine import detect
from launch.machine.detect import Host
from launch.machine.gpu import Gpu
from launch.machine.sysfs import as_number, status_of, text
from launch.schema import Hardware
from launch.schema.enums import Vendor
from launch.schema.host import HostNeeds

AMD = "0x1002"
DISPLAYS = ("0x03", "0x12")  # PCI classes of display controllers and processing accelerators
OTHER_DRIVERS = ("radeon", "vfio-pci")
TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


@dataclass(frozen=True)
class Space:
    free_gb: float
    total_gb: float


@dataclass(frozen=True)
class Probe:
    """Answers of the running kernel. Of a copied tree nobody can ask them."""

    space: Callable[[str], Space | None]  # of the file system that a path is on, or will be
    may_open: Callable[[str], bool]  # beside owner, group and mode: an access list
    clock_synchronized: Callable[[], bool | None]


@dataclass(frozen=True)
class Facts:
    root: Path
    host: Host
    hardware: Hardware | None  # the thresholds of this GPU; None where several kinds, or an unknown one, are here
    run_root: str
    probe: Probe
    only: frozenset[int] | None = None  # indices of the GPUs that a run uses; None: of all that the caller may use
    active: Outcome | None = None  # of the active tests, where they were asked for

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(gpu for index, gpu in enumerate(self.host.gpus) if self.only is None or index in self.only)

    @property
    def amd_gpus(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.gfx.startswith("gfx"))

    @property
    def group(self) -> str:
        return self.hardware.name if self.hardware else "unknown"

    @property
    def needs(self) -> HostNeeds:
        return self.hardware.host if self.hardware else HostNeeds()

    @property
    def is_amd(self) -> bool:
        """What is asked for; else AMD GPUs are here, or on the bus although the driver does not show them."""
        if self.hardware is not None and self.hardware.vendor != Vendor.none:
            return self.hardware.vendor == Vendor.amd
        return bool(self.amd_gpus) or bool(self.host.withheld) or bool(self.amd_cards())

    @property
    def is_live(self) -> bool:
        return self.root == Path("/")

    def amd_cards(self) -> list[str]:
        """PCI addresses of AMD's GPUs on the bus, but for those that another driver has: old ones, those of virtual machines."""
        found = (self.root / "sys/bus/pci/devices").glob("*")
        gpus = [p for p in found if text(p / "vendor") == AMD and (text(p / "class") or "").startswith(DISPLAYS)]
        return sorted(p.name for p in gpus if Path(os.path.realpath(p / "driver")).name not in OTHER_DRIVERS)

    def device(self, gpu: Gpu) -> Path:
        """What the kernel says of a GPU's PCI device."""
        return self.root / "sys/bus/pci/devices" / (gpu.pci_address or "none")

    def whole_gpus(self) -> list[Gpu]:
        """One for each PCI device: partitions share what is read there."""
        return list({gpu.pci_address: gpu for gpu in self.gpus if gpu.pci_address}.values())

    def mask_without(self, addresses: list[str]) -> str:
        """The mask that leaves these GPUs out; empty where it would leave none."""
        same = [gpu for gpu in self.host.gpus if bool(self.amd_gpus) == gpu.gfx.startswith("gfx")]
        kept = [str(index) for index, gpu in enumerate(same) if gpu.pci_address not in addresses]
        return f"{'HIP' if self.amd_gpus else 'CUDA'}_VISIBLE_DEVICES={','.join(kept)}" if kept else ""

    @property
    def is_contained(self) -> bool:
        """Docker, podman, Kubernetes: they leave a mark."""
        marks = (status_of(self.root / ".dockerenv"), status_of(self.root / "run/.containerenv"))
        return any(marks) or "KUBERNETES_SERVICE_HOST" in self.host.environ

    def file(self, path: str) -> str | None:
        return text(self.root / path)

    def may_open(self, node: str) -> bool:
        gid = self.host.device_nodes.get(node)
        return gid is None or self.host.uid == 0 or gid in self.host.member_of or self.probe.may_open(node)


def gather(host: Host, hardware: Hardware | None, run_root: str = "runs", only: frozenset[int] | None = None) -> Facts:
    root = Path(host.sysroot)
    return Facts(root, host, hardware, run_root, RUNNING if root == Path("/") else COPIED, only)


def host_of(sysroot: str) -> Host:
    """Of this machine, or of a tree: there the caller and the environment are those of its proc/self."""
    host = detect.host(sys.executable, sysroot)
    return host if Path(sysroot) == Path("/") else _caller_of(Path(sysroot), host)


def _caller_of(root: Path, host: Host) -> Host:
    rows = (line.partition(":") for line in (text(root / "proc/self/status") or "").splitlines())
    status = {name: [as_number(word) or 0 for word in values.split()] for name, _, values in rows if name in ("Uid", "Gid", "Groups")}
    pairs = (entry.partition("=") for entry in (text(root / "proc/self/environ") or "").split("\0"))
    groups = (*status.get("Gid", [])[:1], *status.get("Groups", []))
    environ = {name: value for name, _, value in pairs if name}
    return dataclasses.replace(host, environ=environ, uid=(status.get("Uid") or [0])[0], member_of=groups)


def _space(path: str) -> Space | None:
    existing = next((p for p in (Path(path), *Path(path).absolute().parents) if status_of(p)), Path("/"))
    try:
        found = shutil.disk_usage(existing)
    except OSError:
        return None
    return Space(found.free / 1e9, found.total / 1e9)


def _clock_synchronized() -> bool | None:
    """What the kernel knows of it, in a container too: adjtimex(2) that changes nothing."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(1024))  # struct timex has 208 bytes
    except (OSError, AttributeError):  # no glibc
        return None
    return None if state < 0 else state != TIME_ERROR


RUNNING = Probe(_space, lambda node: os.access(node, os.R_OK | os.W_OK), _clock_synchronized)
COPIED = Probe(lambda path: None, lambda node: False, lambda: None)
