"""Define the parts of conf/hardware that identify a GPU and its host's needs. Empty: no need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Detect:
    """How hardware=auto distinguishes devices with the same target and number of compute units."""

    # PCI ids, including virtual functions (pci.ids; AMD's amdgpu.ids); empty: not needed
    device_ids: list[int] = field(default_factory=list)
    dies: int = 1  # XCDs; a compute partition has one or more of them
    from_gb: float = 0  # least memory, if two devices are otherwise equal


@dataclass
class HostNeeds:
    """Settings of the host, which launch/doctor.py checks."""

    compute_partition: Optional[str] = None  # the mode that the file's figures assume: SPX
    memory_partition: Optional[str] = None  # NPS1
    numa_balancing: Optional[int] = None  # sysctl kernel.numa_balancing
    iommu_pt_from: Optional[int] = None  # from this many GPUs, the IOMMU must pass through
    hugepages: Optional[str] = None  # transparent hugepages: always
    kernel: Optional[str] = None  # oldest Linux version
    linux_firmware: Optional[str] = None  # oldest release of linux-firmware, as YYYYMMDD
    # oldest firmware of the compute microengine (KFD's fw_version)
    mec_firmware: Optional[int] = None


@dataclass
class Healthy:
    """Speeds of a healthy device, as shares of the figures in its file. Empty: unknown.

    launch/doctor.py active=true compares its measurements with them.
    """

    # of peak_tflops: a product of 8192 x 8192 matrices in the preferred half precision
    gemm: Optional[float] = None
    copy: Optional[float] = None  # of bandwidth_gb_s, read plus written
    # of bandwidth_gb_s: a layer's memory-bound kernels; only the planner uses it
    layers: Optional[float] = None
    # of link_gb_s: bus bandwidth of large all-reduces over all GPUs of a node
    all_reduce: Optional[float] = None
