"""What conf/hardware says of how to know a GPU, and asks of the machine around it. Empty where nothing is known to matter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Detect:
    """What tells a device from others of its target and number of compute units: hardware=auto compares."""

    device_ids: list[int] = field(default_factory=list)  # PCI, virtual functions included (pci.ids; AMD's amdgpu.ids); empty: not needed
    dies: int = 1  # XCDs, of which a compute partition has one or more
    from_gb: float = 0  # memory from which it is this one, where two share everything else


@dataclass
class HostNeeds:
    """launch/doctor.py compares."""

    compute_partition: Optional[str] = None  # the mode that the file's figures are for: SPX
    memory_partition: Optional[str] = None  # NPS1
    numa_balancing: Optional[int] = None  # sysctl kernel.numa_balancing
    iommu_pt_from: Optional[int] = None  # number of GPUs from which an IOMMU has to pass through
    hugepages: Optional[str] = None  # transparent hugepages: always
    kernel: Optional[str] = None  # oldest Linux
    linux_firmware: Optional[str] = None  # oldest release of linux-firmware, a date: YYYYMMDD
    mec_firmware: Optional[int] = None  # oldest firmware of the compute microengine, KFD's fw_version


@dataclass
class Healthy:
    """What a healthy device reaches, as shares of its file's figures: launch/doctor.py active=true compares. Empty where nobody says."""

    gemm: Optional[float] = None  # of peak_tflops, by a product of 8192 x 8192 matrices in the half precision that it prefers
    copy: Optional[float] = None  # of bandwidth_gb_s, read and written
    layers: Optional[float] = None  # of bandwidth_gb_s, by a layer's memory-bound kernels; a planner's figure, which no doctor measures
    all_reduce: Optional[float] = None  # of link_gb_s: bus bandwidth of large sums among all GPUs of a node
