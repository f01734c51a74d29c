"""Define the enumerations of the schema."""

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
    """The processes that get an environment variable of conf/hardware."""

    always = "always"
    trainer = "trainer"  # a process that trains, on any number of GPUs
    server = "server"  # a process that generates with vLLM
    # ranks that communicate through RCCL or NCCL: with each other, or with a server
    multi_gpu = "multi_gpu"
    fsdp = "fsdp"  # ranks that shard parameters (fsdp, zero3)
    eight_gpus = "eight_gpus"  # a process group of eight ranks on one node


class Init(Enum):
    pretrained = "pretrained"
    random = "random"


class Mode(Enum):
    run = "run"
    plan = "plan"


class SpeedMode(Enum):
    """Who chooses the settings that change a step's speed but not its result."""

    auto = "auto"  # the planner, except for keys that the user sets
    off = "off"  # the user; keys of `step` that are null have TRL's defaults


class Rows(Enum):
    """The layout of a step's rows in micro-batches."""

    # joined end to end on each rank, with their boundaries; needs hardware.packed_attention
    packed = "packed"
    grouped = "grouped"  # sorted by length within the step, so micro-batches need little padding
    padded = "padded"  # as in TRL


class Head(Enum):
    """How the output head computes logits and stores them for the backward."""

    tiled = "tiled"  # as TRL does: the backward recomputes logits in tiles
    # for losses that are sums over tokens: the forward pass also computes the logits' gradient
    summed = "summed"
    kept = "kept"  # for log-probabilities: up to 3 GB of gradients are stored for the backward


class Reference(Enum):
    """When training needs a frozen copy of the starting model."""

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
    """The kind of profile that a run writes to profile/."""

    none = "none"
    torch = "torch"  # a trace of a few steps, and a table of their time
    memory = "memory"  # a memory snapshot of torch
    rocprof = "rocprof"  # a ROCm profiler for each rank


class Rocprof(Enum):
    """The profiler that profile=rocprof uses."""

    v3 = "rocprofv3"  # times of kernels, copies, and HIP and RCCL calls
    # hardware counters of every kernel; runs the recipe 13 to 20 times
    compute = "rocprof-compute"
    sys = "rocprof-sys-sample"  # CPU call stacks together with the kernels of the GPU


class Debug(Enum):
    none = "none"
    memory_fault = "memory_fault"  # slow; the error shows the kernel at fault
    compile = "compile"  # saves what torch.compile generates


class NumaBinding(Enum):
    """The cores that recipes/rank/device.py binds a rank to.

    These are the NUMA node or socket of its GPU, or an exclusive share of the cores.
    """

    node = "node"
    socket = "socket"
    exclusive = "exclusive"
    core_complex = "core_complex"


class Network(Enum):
    """The network of a container."""

    bridge = "bridge"  # a separate interface, with access to the outside
    host = "host"  # the network of the host; required for several nodes
    none = "none"  # only a loopback


class Find(Enum):
    """The result that mode=plan searches for with the memory planner."""

    none = "none"
    largest_batch = "largest_batch"  # the largest micro-batch that fits on a rank
    # the groups of conf/hardware that the run fits on, smallest memory first
    smallest_hardware = "smallest_hardware"


class Preflight(Enum):
    """The reaction of a run if the doctor's short checks predict its failure."""

    refuse = "refuse"
    warn = "warn"
