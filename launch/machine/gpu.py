"""Define the known facts of a GPU. A fact that cannot be read is None."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30 / 1e9  # vendors' GB of a GPU's memory are 2**30 bytes; this project's are 1e9


@dataclass(frozen=True)
class Link:
    """One hop from a GPU to another node of the kernel's topology, a GPU's or a CPU's."""

    node: int  # number of the node at the other end
    kind: str  # xgmi, pcie, or `type N` for another of KFD's types
    gb_s: float | None  # per direction, as the driver states it


@dataclass(frozen=True)
class Gpu:
    """One device as torch counts it: a GPU, a die of an MI250X, or a partition of a GPU."""

    product: str  # "unknown" if no product matches
    gfx: str  # compiler target (gfx942, sm_90), or "unknown"
    compute_units: int | None
    memory_gb: float | None  # 1e9 bytes; an integrated GPU's share of the system's memory (GTT)
    group: str | None  # group of conf/hardware that matches the device, if any
    may_be: tuple[str, ...] = ()  # groups that match equally well, in which case `group` is None
    render_minor: int | None = None  # N of /dev/dri/renderDN
    node: int | None = None  # number in the kernel's topology
    device_id: str | None = None  # PCI device id, such as 0x74a1
    pci_address: str | None = None  # 0000:05:00.0; that of the whole GPU for a partition
    uuid: str | None = None  # in the form of ROCr and NVML: GPU-...
    numa_node: int | None = None
    compute_partition: str | None = None  # SPX, DPX, TPX, QPX, CPX; None without such modes
    memory_partition: str | None = None  # NPS1, NPS2, NPS4, NPS8
    partition_of: str | None = None  # the group of the whole GPU, for a partition
    hive: str | None = None  # GPUs with the same value reach one another over xGMI
    firmware: int | None = None  # of the compute microengine (MEC)
    links: tuple[Link, ...] = ()
    usable: bool = True  # False if this container or user may not open its device node
