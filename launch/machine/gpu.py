"""What is known of a GPU. A fact that cannot be read is None."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30 / 1e9  # makers' GB of a GPU's memory are 2**30 bytes, those of this project 1e9


@dataclass(frozen=True)
class Link:
    """One hop from a GPU to another node of the kernel's topology, a GPU's or a CPU's."""

    node: int  # number of the node at its other end
    kind: str  # xgmi, pcie, or `type N` for another type of KFD's
    gb_s: float | None  # per direction, as the driver states it


@dataclass(frozen=True)
class Gpu:
    """One device as torch would count it: a whole GPU, one die of an MI250X, or one partition of a GPU."""

    product: str  # "unknown" where no product fits
    gfx: str  # compiler target (gfx942, sm_90); "unknown"
    compute_units: int | None
    memory_gb: float | None  # 1e9 bytes. Of an integrated GPU: what it may take of the system's memory (GTT)
    group: str | None  # of conf/hardware, where one fits the device
    may_be: tuple[str, ...] = ()  # groups that fit it equally, so that it has none
    render_minor: int | None = None  # N of /dev/dri/renderDN
    node: int | None = None  # number in the kernel's topology
    device_id: str | None = None  # PCI, as 0x74a1
    pci_address: str | None = None  # 0000:05:00.0; that of the whole GPU for a partition
    uuid: str | None = None  # as ROCr and NVML name it: GPU-...
    numa_node: int | None = None
    compute_partition: str | None = None  # SPX, DPX, TPX, QPX, CPX; None where a GPU has no such modes
    memory_partition: str | None = None  # NPS1, NPS2, NPS4, NPS8
    partition_of: str | None = None  # the group of the whole GPU, for a partition
    hive: str | None = None  # GPUs of one value reach one another over xGMI
    firmware: int | None = None  # of the compute microengine (MEC)
    links: tuple[Link, ...] = ()
    usable: bool = True  # False: this container, or this user, was not given its device node
