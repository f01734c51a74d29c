"""Provide what checks read: files of this machine or of a copied tree, and facts of the host."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from containers import images
from launch.checks.measured import Outcome
from launch.config.identity import has_phases
from launch.core import docker_host
from launch.estimate.rank_state import run_bytes
from launch.machine import container_engine, detect, inside
from launch.machine.container_engine import Engine
from launch.machine.detect import Host
from launch.machine.gpu import Gpu
from launch.machine.kfd import INTEGRATED
from launch.machine.sysfs import as_number, status_of, text
from launch.machine.this_python import GPUS, Packages, packages
from launch.schema import Config, Hardware
from launch.schema.enums import Vendor
from launch.schema.host import HostNeeds

AMD = "0x1002"
DISPLAYS = ("0x03", "0x12")  # PCI classes of display controllers and processing accelerators
OTHER_DRIVERS = ("radeon", "vfio-pci")  # of old GPUs, and of GPUs given to a virtual machine
RUN_GB = 50.0  # of an unknown run: a checkpoint of Qwen3-4B with AdamW in fp32, 12 bytes x 4.0e9
RUN_MIN_GB = 0.1  # our choice, for logs and metrics; a benchmark writes only these
TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


@dataclass(frozen=True)
class Space:
    free_gb: float
    total_gb: float


@dataclass(frozen=True)
class Probe:
    """Facts that only the running kernel knows. A copied tree does not have them."""

    space: Callable[[str], Space | None]  # on the disk of a path, which may be missing
    may_open: Callable[[str], bool]  # whether an access list lets the caller open a node
    clock_synchronized: Callable[[], bool | None]
    engine: Callable[[Mapping[str, str]], Engine | None]  # the container engine of an environment
    image_gb: Callable[[str, Mapping[str, str]], float | None]  # as container_engine.image_gb
    packages: Callable[[], Packages] | None = None  # of the Python that runs use without an image


@dataclass(frozen=True)
class Facts:
    root: Path
    host: Host
    # The group that describes the GPUs; None if the GPUs differ or no group fits.
    hardware: Hardware | None
    run_root: str
    run_gb: float  # that a run writes to run_root
    run_writes: str  # what has this size
    probe: Probe
    image: images.Image | None = None  # that the run, or the group's runs, start in docker
    # Indices of the GPUs that a run uses; None for every GPU that the caller may use.
    only: frozenset[int] | None = None
    run: Config | None = None  # the composition to start, if it is known
    active: Outcome | None = None  # of the active tests, if the user requested them

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        gpus, only = self.host.gpus, self.only
        return gpus if only is None else tuple(gpu for i, gpu in enumerate(gpus) if i in only)

    @property
    def amd_gpus(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.is_amd)

    @property
    def integrated(self) -> Gpu | None:
        return next((gpu for gpu in self.amd_gpus if gpu.gfx in INTEGRATED), None)

    @property
    def group(self) -> str:
        return self.hardware.name if self.hardware else "unknown"

    @property
    def needs(self) -> HostNeeds:
        return self.hardware.host if self.hardware else HostNeeds()

    @property
    def is_amd(self) -> bool:
        """Return whether the hardware group is AMD's; without one, whether there is an AMD GPU."""
        if self.hardware is not None and self.hardware.vendor != Vendor.none:
            return self.hardware.vendor == Vendor.amd
        return bool(self.amd_gpus or self.host.withheld or self.amd_cards())

    @property
    def is_live(self) -> bool:
        return self.root == Path("/")

    def amd_cards(self) -> list[str]:
        """Return the PCI addresses of AMD's GPUs, except those with OTHER_DRIVERS."""
        cards = []
        for device in (self.root / "sys/bus/pci/devices").glob("*"):
            is_gpu = (text(device / "class") or "").startswith(DISPLAYS)
            driver = Path(os.path.realpath(device / "driver")).name
            if is_gpu and text(device / "vendor") == AMD and driver not in OTHER_DRIVERS:
                cards.append(device.name)
        return sorted(cards)

    def device(self, gpu: Gpu) -> Path:
        """Return the kernel's folder for a GPU's PCI device."""
        return self.root / "sys/bus/pci/devices" / (gpu.pci_address or "none")

    def physical_gpus(self) -> list[Gpu]:
        """Return one GPU per PCI device, because partitions share the device's files."""
        return list({gpu.pci_address: gpu for gpu in self.gpus if gpu.pci_address}.values())

    def mask_without(self, addresses: list[str]) -> str:
        """Return a mask (NAME=indices) without these GPUs; '' if no GPU would remain."""
        is_amd = bool(self.amd_gpus)
        of_vendor = [gpu for gpu in self.host.gpus if gpu.is_amd == is_amd]
        ids = [
            str(index) for index, gpu in enumerate(of_vendor) if gpu.pci_address not in addresses
        ]
        return f"{'HIP' if is_amd else 'CUDA'}_VISIBLE_DEVICES={','.join(ids)}" if ids else ""

    @property
    def in_container(self) -> bool:
        return inside.container(self.host.environ, self.root)

    @property
    def own_python(self) -> bool:
        """Return whether the run, or runs on these GPUs, use the launcher's Python and no image."""
        if not (self.probe.packages and self.gpus and self.hardware):
            return False
        if self.run:
            runtime = self.run.runtime
            is_here = runtime.on_node == "local" and not runtime.slurm.python
            return self.hardware.vendor in GPUS and is_here
        has_image = self.hardware.container != "none"
        in_image = has_image and not inside.rented(self.host.environ, self.root)
        return self.hardware.vendor in GPUS and not in_image

    def start_with(self, options: str, on_host: str) -> str:
        """Return the options of docker that a container needs, with the remedy on a host."""
        if self.in_container:
            return f"this needs a container that is started with: docker run {options} ..."
        return f"{on_host}. In a container: docker run {options} ..."

    def file(self, path: str) -> str | None:
        return text(self.root / path)

    def may_open(self, node: str) -> bool:
        gid = self.host.device_nodes.get(node)
        by_group = gid is None or self.host.uid == 0 or gid in self.host.member_of
        return by_group or self.probe.may_open(node)


def gather(
    host: Host,
    hardware: Hardware | None,
    run: Config | None = None,
    only: frozenset[int] | None = None,
) -> Facts:
    """Return the facts that the checks read. `run` is the composition to start, if it is known."""
    root = Path(host.sysroot)
    run_root = run.run_root if run else "runs"
    run_gb, run_writes = RUN_GB, "a checkpoint of a 4B model, for want of the overrides of a run"
    if run and has_phases(run):
        run_writes = "a checkpoint of a 4B model; the phases of a pipeline are not added up"
    elif run:
        run_gb = RUN_MIN_GB + run_bytes(run) / 1e9
        run_writes = "checkpoints and model of the run"
    probe = RUNNING if root == Path("/") else COPIED
    name = hardware.container if hardware else "none"
    if run:
        name = run.container.name if run.runtime.on_node == "docker" else "none"
    image = images.load().get(name)
    return Facts(root, host, hardware, run_root, run_gb, run_writes, probe, image, only, run)


def host_of(sysroot: str) -> Host:
    """Return the host. A copied tree has the user and environment in its proc/self."""
    host, root = detect.host(sys.executable, sysroot), Path(sysroot)
    if root == Path("/"):
        return host
    rows = (line.partition(":") for line in (text(root / "proc/self/status") or "").splitlines())
    status = {
        name: [as_number(word) or 0 for word in values.split()]
        for name, _, values in rows
        if name in ("Uid", "Gid", "Groups")
    }
    pairs = (entry.partition("=") for entry in (text(root / "proc/self/environ") or "").split("\0"))
    return dataclasses.replace(
        host,
        environ={name: value for name, _, value in pairs if name},
        uid=(status.get("Uid") or [0])[0],
        member_of=(*status.get("Gid", [])[:1], *status.get("Groups", [])),
    )


def _space(path: str) -> Space | None:
    candidates = (Path(path), *Path(path).absolute().parents)
    existing = next((p for p in candidates if status_of(p)), Path("/"))
    try:
        usage = shutil.disk_usage(existing)
    except OSError:
        return None
    return Space(usage.free / 1e9, usage.total / 1e9)


def _clock_synchronized() -> bool | None:
    """Ask the kernel with a read-only adjtimex(2), which works in a container too."""
    try:
        # The buffer is large enough: struct timex has 208 bytes.
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(1024))
    except (OSError, AttributeError):  # no glibc
        return None
    return None if state < 0 else state != TIME_ERROR


RUNNING = Probe(
    _space,
    lambda node: os.access(node, os.R_OK | os.W_OK),
    _clock_synchronized,
    container_engine.engine,
    lambda reference, environ: container_engine.image_gb(reference, docker_host.address(environ)),
    packages,
)
COPIED = Probe(
    lambda path: None,
    lambda node: False,
    lambda: None,
    lambda environ: None,
    lambda reference, environ: None,
)
