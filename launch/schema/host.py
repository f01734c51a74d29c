"""Define what a run needs of its host: the parts of conf/hardware, and conf/runtime.

In conf/hardware an empty value means no need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from launch.schema.checked import Text, checked
from launch.schema.enums import Network
from launch.schema.variables import INSIDE


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


# A type may be a number, such as 4090; a number below 100 is a count.
GRES = Text(
    "one resource, with a type but no count, which is topology.num_gpus=N",
    "gpu:mi300x",
    r"(?:[A-Za-z]\w*(?::(?!\d{1,2}$)[\w.-]+)?)?",
)


# sbatch's forms of a time: [days-]hours[:minutes[:seconds]] with days, else minutes[:seconds] or
# hours:minutes:seconds
TIME = Text(
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]; 0: no limit",
    "1-12:00:00",
    r"(?:\d+-)?\d+(?::\d+){0,2}",
)

SECRET_NAME = Text(
    "a variable of your shell that the launcher does not set itself",
    "[HF_TOKEN]",
    rf"(?!(?:PATH|LD_LIBRARY_PATH|PYTHONPATH|\w+_VISIBLE_DEVICES|{'|'.join(INSIDE)})$)[A-Za-z_]\w*",
)


def slurm_seconds(time: str) -> int:
    """Return the seconds of an sbatch time; 0 means no limit."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days or len(parts) == 3:  # hours come first
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class Inner(Enum):
    """The runtime that starts a Slurm job's processes on their node."""

    local = "local"
    docker = "docker"


@dataclass
class Slurm:
    """Options of a Slurm job and of the network between its nodes. Counts are per node."""

    nodes: int = checked(1, least=1)
    inner: Inner = Inner.local
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    time: Optional[str] = checked(None, text=TIME)
    gres: str = checked("gpu", text=GRES)  # the cluster's name for the GPUs
    options: list[str] = field(default_factory=list)  # for sbatch, each `--name` or `--name=value`
    python: Optional[str] = None  # interpreter on the nodes; empty: the launcher's own
    # seconds before the time limit at which Slurm signals the run, so that it can save
    early_signal_s: int = checked(360, least=1, most=65535)
    requeue: bool = True  # requeue an interrupted job, which resumes from its checkpoint
    wait: bool = False  # follow the job to its end and return its exit code
    rendezvous_timeout_s: int = checked(600, least=1)  # how long nodes wait for one another
    interface: Optional[str] = None  # several nodes: the network interface between them
    hca: Optional[str] = None  # RDMA adapters, as in NCCL_IB_HCA; empty: all found
    gid_index: Optional[int] = checked(None, least=0)  # RoCE: the row of the port's GID table


@dataclass
class Runtime:
    """Start of processes. The keys from `network` to `secrets` are for docker."""

    name: str = checked(words=("local", "docker", "slurm"))
    # from SIGTERM to SIGKILL; must exceed the slowest save
    stop_timeout_s: int = checked(300, least=1)
    # If for this long there is no step, token or loading progress, stacks are dumped and the run is
    # stopped.
    hang_timeout_s: int = checked(1200, least=1)
    # restarts after a failure or a hang, from the newest complete checkpoint
    max_restarts: int = checked(0, least=0)
    network: Optional[Network] = None
    shm_gb: Optional[float] = checked(None, least=0.064)  # /dev/shm of a process group
    # host memory of a process group; empty: no limit
    memory_gb: Optional[float] = checked(None, least=0.1)
    infiniband: bool = False  # pass /dev/infiniband
    # shell variables that become files in the container
    secrets: list[str] = checked(default_factory=list, text=SECRET_NAME)
    slurm: Slurm = field(default_factory=Slurm)

    @property
    def on_node(self) -> str:
        """Return what starts processes on a node: under runtime=slurm, the inner runtime."""
        return self.slurm.inner.name if self.name == "slurm" else self.name
