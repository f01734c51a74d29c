"""Values that a key of the schema may have, where they are few."""

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
    """Which processes an environment variable of the hardware group is for."""

    always = "always"
    trainer = "trainer"  # a process that trains, on any number of GPUs
    server = "server"  # a process that generates with vLLM
    multi_gpu = "multi_gpu"  # ranks that talk through RCCL or NCCL: of a process group, or a server and its trainers
    fsdp = "fsdp"  # ranks that shard parameters (fsdp, zero3)
    eight_gpus = "eight_gpus"  # a process group of eight ranks


class Init(Enum):
    pretrained = "pretrained"
    random = "random"


class Mode(Enum):
    run = "run"
    plan = "plan"


class Speed(Enum):
    """Who decides what changes a step's speed and not its result."""

    auto = "auto"  # the planner, for what nobody gave
    off = "off"  # the composition; step.* left null mean the plain way


class Rows(Enum):
    """How the rows of one optimizer step become batches."""

    packed = "packed"  # those of a rank laid end to end, with document boundaries; needs hardware.packed_attention
    grouped = "grouped"  # sorted by length inside the step, so that rows of one micro-batch need little padding
    padded = "padded"  # as TRL pads them


class Format(Enum):
    text = "text"
    json = "json"


class Profile(Enum):
    """What a run leaves in profile/ beside its result."""

    none = "none"
    torch = "torch"  # a trace of a few steps, and what their time went into
    memory = "memory"  # torch's memory snapshot
    rocprof = "rocprof"  # each rank under a profiler of ROCm


class Rocprof(Enum):
    """The program that profile=rocprof starts each rank under."""

    v3 = "rocprofv3"  # kernels, copies and calls of HIP and RCCL, with times
    compute = "rocprof-compute"  # hardware counters of every kernel; runs the program 13 to 20 times
    sys = "rocprof-sys-sample"  # call stacks of the CPU beside the GPU's kernels


class Debug(Enum):
    none = "none"
    memory_fault = "memory_fault"


class NumaBinding(Enum):
    """To which cores each rank binds itself (recipes/common/binding.py): of its GPU's NUMA node or socket, or a share for itself."""

    node = "node"
    socket = "socket"
    exclusive = "exclusive"
    core_complex = "core_complex"


class Network(Enum):
    """What a container reaches."""

    bridge = "bridge"  # the outside, through an interface of its own
    host = "host"  # everything that the host reaches; several nodes need it
    none = "none"  # its own loopback only


class Find(Enum):
    """What mode=plan searches for with the memory planner."""

    none = "none"
    largest_batch = "largest_batch"  # the most sequences that a rank can take at once
    smallest_hardware = "smallest_hardware"  # the groups of conf/hardware that it fits, the least memory first


class Preflight(Enum):
    """What a run does where the doctor's short set finds what would make it fail."""

    refuse = "refuse"
    warn = "warn"
