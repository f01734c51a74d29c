"""Define the facts about a GPU. A fact that cannot be read is None."""

from dataclasses import dataclass

GIB = 2**30 / 1e9  # GB (1e9 bytes) per GiB; a vendor's "GB" of GPU memory is a GiB


@dataclass(frozen=True)
class Link:
    """A link from a GPU to another node of the kernel's topology, which is a GPU or a CPU."""

    node: int  # number of the node at the other end
    kind: str  # xgmi, pcie, or `type N` for any other type of KFD
    gb_s: float | None  # per direction, as the driver reports it


@dataclass(frozen=True)
class Gpu:
    """One device as torch counts it: a GPU, a die of an MI250X, or a partition of a GPU."""

    product: str  # "unknown" if no product matches
    gfx: str  # compiler target (gfx942, sm_90), or "unknown"
    compute_units: int | None
    memory_gb: float | None  # 1e9 bytes; for an integrated GPU, the system memory it can use (GTT)
    group: str | None  # the group of conf/hardware that matches, if exactly one does
    may_be: tuple[str, ...] = ()  # groups that match equally well; `group` is then None
    render_minor: int | None = None  # N of /dev/dri/renderDN
    node: int | None = None  # number in the kernel's topology
    device_id: str | None = None  # PCI device id, such as 0x74a1
    pci_address: str | None = None  # such as 0000:05:00.0; all partitions of a GPU share one
    uuid: str | None = None  # in the form of ROCr and NVML: GPU-...
    numa_node: int | None = None
    compute_partition: str | None = None  # SPX, DPX, TPX, QPX, CPX; None if the GPU has no modes
    memory_partition: str | None = None  # NPS1, NPS2, NPS4, NPS8
    partition_of: str | None = None  # for a partition, the group of the complete GPU
    hive: str | None = None  # GPUs with the same value are connected by xGMI
    firmware: int | None = None  # version of the compute microengine (MEC)
    links: tuple[Link, ...] = ()
    usable: bool = True  # False if this container or user may not open its device node

    @property
    def is_amd(self) -> bool:
        """Return whether the GPU is AMD's; only its driver KFD numbers nodes."""
        return self.node is not None or self.gfx.startswith("gfx")
