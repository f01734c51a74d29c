"""What conf/hardware asks of the machine around a GPU: launch/doctor.py compares. Empty where nothing is known to matter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional


class Preflight(Enum):
    """What a run does where the doctor's short set finds what would make it fail."""

    refuse = "refuse"
    warn = "warn"


@dataclass
class HostNeeds:
    compute_partition: Optional[str] = None  # the mode that the file's figures are for: SPX
    memory_partition: Optional[str] = None  # NPS1
    numa_balancing: Optional[int] = None  # sysctl kernel.numa_balancing
    iommu_pt_from: Optional[int] = None  # number of GPUs from which an IOMMU has to pass through
    hugepages: Optional[str] = None  # transparent hugepages: always
    kernel: Optional[str] = None  # oldest Linux
    linux_firmware: Optional[str] = None  # oldest release of linux-firmware, a date: YYYYMMDD
    mec_firmware: Optional[int] = None  # oldest firmware of the compute microengine, KFD's fw_version
