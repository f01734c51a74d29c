"""Define enumerations: the values of keys that accept only a few."""

from __future__ import annotations

from enum import Enum


class Vendor(Enum):
    amd = "amd"
    nvidia = "nvidia"
    none = "none"


class Link(Enum):
    xgmi = "xgmi"
    nvlink = "nvlink"
    pcie = "pcie"
    none = "none"


class When(Enum):
    """Processes that get an environment variable of the hardware group."""

    always = "always"
    trainer = "trainer"  # a process that trains, on any number of GPUs
    server = "server"  # a process that generates with vLLM
    # ranks that communicate by RCCL or NCCL: in a process group, or a server and its trainers
    multi_gpu = "multi_gpu"
    fsdp = "fsdp"  # ranks that shard parameters (fsdp, zero3)
    eight_gpus = "eight_gpus"  # a process group of eight ranks


class Init(Enum):
    pretrained = "pretrained"
    random = "random"


class Mode(Enum):
    run = "run"
    plan = "plan"


class Speed(Enum):
    """Source of the settings that change a step's speed but not its result."""

    auto = "auto"  # the planner, for keys that the user did not set
    off = "off"  # the configuration; keys of `step` left null mean TRL's defaults


class Rows(Enum):
    """Layout of an optimizer step's rows in batches."""

    # end to end on each rank, with document boundaries; needs hardware.packed_attention
    packed = "packed"
    grouped = "grouped"  # sorted by length within the step, so micro-batches need little padding
    padded = "padded"  # as in TRL


class Head(Enum):
    """Method of computing logits, and what the head keeps for the backward."""

    tiled = "tiled"  # TRL's: logits are recomputed in the backward
    # for losses that sum over tokens: logits and their gradient are computed together
    summed = "summed"
    kept = "kept"  # log-probabilities: up to 3 GB of gradients stay for the backward


class Reference(Enum):
    """Condition under which a training needs a frozen copy of its starting model."""

    none = "none"
    always = "always"
    beta = "beta"  # unless method.args.beta is 0


class Use(Enum):
    none = "none"
    optional = "optional"
    required = "required"


class Format(Enum):
    text = "text"
    json = "json"


class Profile(Enum):
    """Kind of profile that a run writes to profile/."""

    none = "none"
    torch = "torch"  # a trace of a few steps, and where their time went
    memory = "memory"  # torch's memory snapshot
    rocprof = "rocprof"  # each rank under a ROCm profiler


class Rocprof(Enum):
    """The program that profile=rocprof starts each rank under."""

    v3 = "rocprofv3"  # times of kernels, copies, and HIP and RCCL calls
    # hardware counters of every kernel; runs the program 13 to 20 times
    compute = "rocprof-compute"
    sys = "rocprof-sys-sample"  # CPU call stacks together with the GPU's kernels


class Debug(Enum):
    none = "none"
    memory_fault = "memory_fault"


class NumaBinding(Enum):
    """Cores that a rank gets: its GPU's NUMA node or socket, or a share that no other rank gets.

    recipes/rank/device.py binds them.
    """

    node = "node"
    socket = "socket"
    exclusive = "exclusive"
    core_complex = "core_complex"


class Network(Enum):
    """Network that a container can reach."""

    bridge = "bridge"  # the outside, by its own interface
    host = "host"  # everything that the host reaches; required for several nodes
    none = "none"  # only its own loopback


class Find(Enum):
    """Search that mode=plan does with the memory planner."""

    none = "none"
    largest_batch = "largest_batch"  # the most sequences that fit on a rank at once
    # the groups of conf/hardware on which the run fits, least memory first
    smallest_hardware = "smallest_hardware"


class Preflight(Enum):
    """Reaction of a run if the doctor's short checks predict its failure."""

    refuse = "refuse"
    warn = "warn"
