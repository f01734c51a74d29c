"""Define the schema of conf/runtime, and the parts of conf/hardware that describe the host.

In conf/hardware, null means that there is no requirement.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from launch.schema.checked import MAX_SECONDS, Text, checked
from launch.schema.enums import Network
from launch.schema.variables import CONTAINER_VARIABLES, RANK_NAMES


@dataclass
class Detect:
    """How hardware=auto distinguishes devices with the same target and number of compute units."""

    # PCI ids, including those of virtual functions (pci.ids; AMD's amdgpu.ids)
    device_ids: list[int] = field(default_factory=list)
    dies: int = 1  # XCDs; a compute partition consists of one or more
    from_gb: float = 0  # smallest memory, for devices that are otherwise equal


@dataclass
class HostNeeds:
    """Settings that the host should have. launch/doctor.py checks them."""

    compute_partition: Optional[str] = None  # mode that the file's values assume, such as SPX
    memory_partition: Optional[str] = None  # mode that the file's values assume, such as NPS1
    numa_balancing: Optional[int] = None  # sysctl kernel.numa_balancing
    iommu_pt_from: Optional[int] = None  # minimum number of GPUs that need IOMMU pass-through
    hugepages: Optional[str] = None  # mode of transparent hugepages, such as always
    kernel: Optional[str] = None  # oldest supported version of Linux
    linux_firmware: Optional[str] = None  # oldest supported release of linux-firmware, YYYYMMDD
    # oldest supported firmware of the compute microengine (KFD's fw_version)
    mec_firmware: Optional[int] = None


@dataclass
class Healthy:
    """Speeds of a healthy device, as shares of the peaks in its file. null: unknown.

    launch/doctor.py active=true compares measurements with them.
    """

    # of peak_tflops: a product of 8192 x 8192 matrices in the preferred half precision
    gemm: Optional[float] = None
    copy: Optional[float] = None  # of bandwidth_gb_s: a copy, bytes read plus bytes written
    # of bandwidth_gb_s: the memory-bound kernels of a layer; only the planner uses this
    layers: Optional[float] = None
    # of link_gb_s: bus bandwidth of large all-reduces over all GPUs of a node
    all_reduce: Optional[float] = None


# A type may be a number, such as 4090. A number below 100 would be a count.
GRES = Text(
    "one resource, with or without a type (set the count by topology.num_gpus=N)",
    "gpu:mi300x",
    r"(?:[A-Za-z]\w*(?::(?!\d{1,2}$)[\w.-]+)?)?",
)


# the formats of a time that sbatch accepts
TIME = Text(
    "minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]], or 0 for no limit",
    "1-12:00:00",
    r"(?:\d+-)?\d+(?::\d+){0,2}",
)

SHELL_NAME = Text(
    "names of shell variables that the launcher does not set itself",
    "[HF_TOKEN]",
    rf"(?!(?:PATH|LD_LIBRARY_PATH|PYTHONPATH|\w+_VISIBLE_DEVICES|{'|'.join(CONTAINER_VARIABLES)}|{RANK_NAMES.pattern})$)[A-Za-z_]\w*",
)


def slurm_seconds(time: str) -> int:
    """Convert a time of sbatch to seconds; 0 means no limit."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days or len(parts) == 3:  # parts start with hours
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class NodeContainer(Enum):
    """The program that starts a job's processes in the image, if any."""

    none = "none"  # the Python of runtime.slurm.python
    docker = "docker"
    apptainer = "apptainer"
    pyxis = "pyxis"  # srun with NVIDIA's plugin, which runs enroot


@dataclass
class Slurm:
    """Options of a Slurm job and of the network between its nodes. Counts are per node."""

    nodes: int = checked(1, minimum=1)
    container: NodeContainer = NodeContainer.none
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    time: Optional[str] = checked(None, text=TIME)
    gres: str = checked("gpu", text=GRES)  # the cluster's name for the GPUs
    options: list[str] = field(default_factory=list)  # of sbatch, each `--name` or `--name=value`
    python: Optional[str] = None  # interpreter on the nodes; null: the launcher's
    # Slurm signals the run this many seconds before the time limit, so that it can save
    early_signal_s: int = checked(360, minimum=1, maximum=65535)
    requeue: bool = True  # requeue an interrupted job, which resumes from its checkpoint
    wait: bool = False  # wait for the end of the job and return its exit code
    rendezvous_timeout_s: int = checked(600, minimum=1)  # how long nodes wait for each other
    interface: Optional[str] = None  # several nodes: the network interface between them
    hca: Optional[str] = None  # RDMA adapters, as in NCCL_IB_HCA; null: all adapters
    gid_index: Optional[int] = checked(None, minimum=0)  # RoCE: row of the port's GID table


# Kubernetes: names of objects are DNS subdomains (RFC 1123)
OBJECT = Text(
    "lowercase letters, digits, - and .", "rocm-recipes", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
)


@dataclass
class Kubernetes:
    """Names of the objects that the Job of runtime=kubernetes uses."""

    claim: str = checked("rocm-recipes", text=OBJECT)  # PersistentVolumeClaim
    secret: str = checked("rocm-recipes", text=OBJECT)  # Secret with the values of runtime.secrets


@dataclass
class Runtime:
    """How processes are started. The keys from `network` to `secrets` apply to containers."""

    name: str = checked(words=("local", "docker", "apptainer", "slurm", "kubernetes"))
    # time from SIGTERM to SIGKILL; must exceed the slowest save
    stop_timeout_s: int = checked(300, minimum=1, maximum=MAX_SECONDS)
    # After this time without a step, token or loading progress, the stacks are dumped and the run
    # is stopped.
    hang_timeout_s: int = checked(1200, minimum=1, maximum=MAX_SECONDS)
    # number of restarts after a failure or a hang, from the newest complete checkpoint
    max_restarts: int = checked(0, minimum=0)
    network: Optional[Network] = None
    shm_gb: Optional[float] = checked(None, minimum=0.064)  # size of /dev/shm of a process group
    # limit on the host memory of a process group; null: no limit
    memory_gb: Optional[float] = checked(None, minimum=0.1)
    infiniband: bool = False  # make /dev/infiniband available
    # shell variables that are passed to the container as files
    secrets: list[str] = checked(default_factory=list, text=SHELL_NAME)
    # further shell variables that processes inherit; a container gets them as files
    pass_env: list[str] = checked(default_factory=list, text=SHELL_NAME)
    # names of user_env whose values are not secrets, so that records may contain them
    public_env: list[str] = field(default_factory=list)
    slurm: Slurm = field(default_factory=Slurm)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)

    @property
    def on_node(self) -> str:
        """Return the runtime on a node: under runtime=slurm that of its container, or local."""
        if self.name != "slurm":
            return self.name
        return "local" if self.slurm.container == NodeContainer.none else self.slurm.container.name

    @property
    def in_container(self) -> bool:
        """Return whether the launcher starts processes in containers of the image."""
        return self.on_node in ("docker", "apptainer", "pyxis")
