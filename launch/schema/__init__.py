"""Define the typed configuration. The YAML files under conf/ contain the values.

Hydra merges the groups into `Config`, which rejects unknown keys and values of a wrong type. Names
end in units: `_gb` is 1e9 bytes, `_gb_s` 1e9 bytes per second, `_tflops` 1e12 floating-point
operations per second. The exception is hardware.memory_gb, which is in GiB, as vendors count.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import MISSING

from launch.schema.checked import COUNTER, MAX_BATCH, MAX_COUNT, MAX_RANKS, NAME_OR_EMPTY, checked
from launch.schema.data import Data as Data
from launch.schema.data import Task as Task
from launch.schema.enums import (
    Debug,
    Find,
    Format,
    Init,
    Link,
    Mode,
    NumaBinding,
    Preflight,
    Profile,
    Rocprof,
    Rows,
    SpeedMode,
    Vendor,
    When,
)
from launch.schema.host import Detect, Healthy, HostNeeds
from launch.schema.host import NodeContainer as NodeContainer
from launch.schema.host import Runtime as Runtime
from launch.schema.host import Slurm as Slurm
from launch.schema.method import Method as Method
from launch.schema.method import Properties as Properties
from launch.schema.method import Sandbox as Sandbox

PACKED_ATTENTION = (None, "varlen", "flash_attention_2", "sdpa")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
STRATEGIES = ("none", "ddp", "fsdp", "zero2", "zero3")
# in the order of shapes.linear_sizes
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOPOLOGIES = ("single", "ddp", "fsdp", "zero2", "zero3", "split", "colocate")
# trackers, as in transformers' report_to
TRACKERS = (
    *("none", "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte"),
    *("kubeflow", "mlflow", "neptune", "swanlab", "tensorboard", "trackio", "wandb"),
)


@dataclass
class EnvVar:
    """An environment variable, the reason for its value, and the source of that reason."""

    value: str = MISSING
    reason: str = MISSING
    source: str = MISSING
    when: When = When.always


@dataclass
class Dataloader:
    num_workers: int = checked(minimum=0)
    pin_memory: bool = MISSING


@dataclass
class Rocm:
    """ROCm versions that support a GPU; `max` is null if the newest version does."""

    min: str = MISSING
    max: Optional[str] = None


@dataclass
class Hardware:
    """One kind of device in its usual node. `gpus_per_node` counts devices as torch does."""

    name: str = MISSING
    product: str = MISSING
    vendor: Vendor = MISSING
    gfx: str = MISSING  # compiler target: gfx942, sm_90, or cpu
    gpus_per_node: int = checked(minimum=1, maximum=MAX_RANKS)
    memory_gb: float = checked(minimum=1)  # GiB, as vendors count; plans show 1e9 bytes
    # Share by which memory may exceed the plan. The default, for GPUs whose memory we never
    # measured, warns from at most 85% of it. 10 of the 14 published runs on such GPUs took at most
    # 1.18 times the plan, and the worst took 1.35 times (docs/results/memory.md).
    memory_error: float = checked(0.18, minimum=0)
    unified_memory: bool = False  # the GPU shares the memory of the host
    bandwidth_gb_s: float = checked(minimum=1)
    compute_units: int = MISSING
    detect: Detect = field(default_factory=Detect)
    # dense, by precision: fp32, tf32, fp16, bf16, fp8, fp4; omit precisions of unknown speed
    peak_tflops: dict[str, float] = field(default_factory=dict)
    link: Link = Link.none
    link_gb_s: Optional[float] = None  # sum of a device's links, per direction
    hive: Optional[int] = None  # number of devices that these links connect; null: all of a node
    # between two hives, per direction; limits a ring that spans several hives
    hives_gb_s: Optional[float] = None
    precisions: list[str] = MISSING  # compute precisions, the preferred one first
    attention: str = checked(words=ATTENTION)  # attn_implementation of transformers
    # kernel that computes attention within each packed row; null: rows are not packed
    packed_attention: Optional[str] = checked(None, words=PACKED_ATTENTION)
    fused_attention: bool = True  # torch has a kernel that does not store the scores
    compile: bool = True  # torch.compile works
    # Compiled layers and the kernel for packed rows were verified on this device. If not, a run
    # compares them on its first micro-batch with eager layers and the attention of padded rows.
    kernels_measured: bool = False
    triton: bool = True  # the Triton version in our tests compiles for this device without spills
    vllm: bool = True  # an image with vLLM supports this device
    dataloader: Dataloader = field(default_factory=Dataloader)
    env: dict[str, EnvVar] = field(default_factory=dict)
    rocm: Optional[Rocm] = None
    host: HostNeeds = field(default_factory=HostNeeds)
    healthy: Healthy = field(default_factory=Healthy)
    container: str = MISSING  # name of the image for this device


@dataclass
class Model:
    """The shape of a model, so that plans need no download, and the location of its weights."""

    name: str = MISSING
    # model_type of transformers; plans are exact for those in launch/schema/shapes.py
    architecture: str = MISSING
    hub_id: Optional[str] = None
    revision: Optional[str] = None  # commit on the Hub; null: the cache's or the newest, recorded
    gated: bool = False  # the Hub gives it only to accounts that have accepted its license
    path: Optional[str] = None  # local directory; takes precedence over hub_id
    # a run, in place of path and hub_id: the model that this run started from
    base_of: Optional[str] = None
    chat_template: Optional[str] = None  # Jinja file that replaces the tokenizer's template
    init: Init = Init.pretrained
    num_layers: int = checked(minimum=1, maximum=MAX_COUNT)
    hidden_size: int = checked(minimum=1, maximum=MAX_COUNT)
    # of one expert, if the model has experts
    intermediate_size: int = checked(minimum=1, maximum=MAX_COUNT)
    num_heads: int = checked(minimum=1, maximum=MAX_COUNT)
    num_kv_heads: int = checked(minimum=1, maximum=MAX_COUNT)
    head_dim: int = checked(minimum=1, maximum=MAX_COUNT)
    vocab_size: int = checked(minimum=1, maximum=MAX_COUNT)
    tied_embeddings: bool = MISSING
    attention_bias: bool = False  # bias on the query, key and value projections
    num_experts: int = checked(0, minimum=0)  # in each layer; 0: a dense model
    experts_per_token: int = checked(0, minimum=0)
    max_positions: int = checked(minimum=1, maximum=MAX_COUNT)
    rope_theta: float = MISSING
    rms_norm_eps: float = MISSING
    # published or counted; a test compares it with the shape
    num_parameters: int = checked(minimum=1)


@dataclass
class Adapter:
    name: str = MISSING
    # size of the low-rank matrices
    rank: Optional[int] = checked(None, minimum=1, maximum=MAX_COUNT)
    # scale: alpha / rank, or alpha / sqrt(rank) with rslora
    alpha: Optional[int] = checked(None, minimum=1, maximum=MAX_COUNT)
    dropout: float = checked(0.0, minimum=0, below=1)
    # or a list of linear layers; checked here because PEFT silently skips unknown names
    target_modules: Any = checked("all-linear", words=("all-linear", *LINEARS))
    rslora: bool = False
    dora: bool = False
    quantize_base: bool = False  # store the frozen base weights in nf4
    path: Optional[str] = None  # adapter of the same kind to continue training: <run>/adapter


@dataclass
class Precision:
    name: str = MISSING
    # dtype of matrix products: fp32, fp16, bf16, fp8
    compute: str = checked(words=("fp32", "fp16", "bf16", "fp8"))
    # dtype of the stored weights: fp32, fp16, bf16, nf4
    weights: str = checked(words=("fp32", "fp16", "bf16", "nf4"))


@dataclass
class Fsdp:
    # dtype for summing gradients over the ranks: fp32 or bf16
    reduce_dtype: str = checked("fp32", words=("fp32", "bf16"))
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    state_dict_type: str = checked(
        "SHARDED_STATE_DICT", words=("FULL_STATE_DICT", "SHARDED_STATE_DICT")
    )


@dataclass
class Zero:
    offload_optimizer: bool = False
    offload_parameters: bool = False


@dataclass
class Topology:
    """The placement of processes on GPUs."""

    name: str = checked(words=TOPOLOGIES)
    # null: all GPUs of the node, but only one under single and colocate
    num_gpus: Optional[int] = checked(None, minimum=1, maximum=MAX_RANKS)
    strategy: str = checked(words=STRATEGIES)  # of the trainers: none, ddp, fsdp, zero2, zero3
    # split: number of model replicas that generate, behind one address; auto: as many as are
    # predicted to be fastest
    servers: Any = checked(0, minimum=0)
    server_tensor_parallel: int = checked(1, minimum=1)  # split: GPUs of one replica
    # split, and engine=vllm: share of a GPU's memory that vLLM may use
    server_memory_share: float = checked(0.9, above=0, maximum=1)
    # split, and engine=vllm: size of the KV cache. Set it if several vLLM engines start on one GPU
    # at the same time, because each would measure the free memory.
    server_cache_gb: Optional[float] = checked(None, minimum=0.001)
    # split, and engine=vllm: tokens of prompt and completion; null: all positions of the model
    server_max_length: Optional[int] = checked(None, minimum=2)
    # split, colocate and engine=vllm: additional arguments of vLLM's engine, such as
    # {max_num_seqs: 512}; null removes an argument
    server_args: dict[str, Any] = field(default_factory=dict)
    # split: true generates the next batch while the current one trains; stream generates
    # continuously and trains on complete groups; null: true if no other setting prevents it
    overlap: Any = checked(None, words=(None, False, True, "stream"))
    # overlap=stream: oldest weights that may generate a completion, in optimizer steps; null: the
    # number of steps that two generations provide for
    max_staleness: Optional[int] = checked(None, minimum=0)
    numa_binding: Optional[NumaBinding] = None
    tensor_parallel: int = checked(1, minimum=1, maximum=1)  # of training
    pipeline_parallel: int = checked(1, minimum=1, maximum=1)  # of training
    fsdp: Fsdp = field(default_factory=Fsdp)
    zero: Zero = field(default_factory=Zero)


@dataclass
class Container:
    """An image: a name in containers/images.lock.yaml, or `custom` with the user's reference."""

    name: str = MISSING
    reference: Optional[str] = None


@dataclass
class Tracking:
    name: str = checked(words=TRACKERS)
    package: Optional[str] = None  # required package; null: derived from the tracker's name
    project: Optional[str] = None


@dataclass
class Target:
    """A published or promised value, shown next to the run's value."""

    value: float = MISSING
    source: str = MISSING


@dataclass
class Phase:
    """One run of a pipeline, as overrides on top of the experiment.

    A phase with method=raft expands to the phases of its cycles.
    """

    name: str = MISSING
    overrides: list[str] = field(default_factory=list)
    model_from: Optional[str] = None  # earlier phase whose model this one starts from
    # earlier phase of method=sample whose selected samples are the training data; dpo: all samples,
    # as pairs
    data_from: Optional[str] = None
    # method=export: earlier evaluation of the same model, for the model card
    results_from: Optional[str] = None
    # continue with the next phase if this one fails or cannot run on this machine
    optional: bool = False


class Direction(Enum):
    minimize = "minimize"
    maximize = "maximize"


@dataclass
class Parameter:
    """One key of a search and its values: a list, or a range that includes both ends."""

    key: str = MISSING  # a key or a group, as on the command line
    values: Optional[list[Any]] = None
    low: Optional[float] = None
    high: Optional[float] = None
    log: bool = False  # uniform in the logarithm
    integer: bool = False  # whole numbers only


@dataclass
class Sweep:
    """The search of `-m sweep=NAME`. `none` runs all combinations of lists on the command line."""

    name: str = "none"
    overrides: list[str] = field(default_factory=list)  # for all trials; the command line wins
    space: dict[str, Parameter] = field(default_factory=dict)
    metric: Optional[str] = None  # key of result.json, or of the last line of metrics.jsonl
    direction: Direction = Direction.minimize
    num_trials: int = 20  # if lists have at most this many combinations, all are tried
    # number of concurrent trials; null: as many as fit on the GPUs, or one without GPUs
    parallel: Optional[int] = None


@dataclass
class Step:
    """Settings that change the speed of an optimizer step but not its result.

    Keys that are null are chosen by speed=auto, or have TRL's defaults under speed=off.
    """

    compile: Optional[bool] = None  # compile each decoder layer (torch regional compilation)
    rows: Optional[Rows] = None
    # with method.args.gradient_checkpointing: number of layers to recompute, from the first; null:
    # all layers
    checkpointed_layers: Optional[int] = checked(None, minimum=1)


@dataclass
class Choice:
    """A value that was chosen for a run. `before` is the default that it replaces, or null."""

    key: str = MISSING
    value: Any = None
    reason: str = MISSING
    before: Any = None


@dataclass
class Config:
    hardware: Hardware = field(default_factory=Hardware)
    model: Model = field(default_factory=Model)
    method: Method = field(default_factory=Method)
    adapter: Adapter = field(default_factory=Adapter)
    precision: Precision = field(default_factory=Precision)
    topology: Topology = field(default_factory=Topology)
    data: Data = field(default_factory=Data)
    container: Container = field(default_factory=Container)
    runtime: Runtime = field(default_factory=Runtime)
    tracking: Tracking = field(default_factory=Tracking)
    sweep: Sweep = field(default_factory=Sweep)
    step: Step = field(default_factory=Step)

    speed: SpeedMode = SpeedMode.auto
    # keys that speed=auto must not change, in addition to those that the user sets
    speed_keeps: list[str] = field(default_factory=list)
    # choices of speed=auto; the planner sets them, users do not
    chosen: list[Choice] = field(default_factory=list)
    # what an evaluation takes from the run that trained its model; users do not set it
    followed: list[Choice] = field(default_factory=list)
    mode: Mode = Mode.run  # plan: print everything that would run, and change nothing
    find: Find = Find.none
    format: Format = Format.text  # of the plan and the result
    verbose: bool = False  # the text plan shows full command lines and environments
    smoke: bool = False  # scale the composition down, so that a CPU runs it in seconds
    # keys that smoke=true must not change, in addition to those on the command line
    smoke_keeps: list[str] = field(default_factory=list)
    preflight: Preflight = Preflight.refuse
    resume: str = "auto"  # auto, never, or a run directory
    # false is for measurements, because saving 8B takes longer than a few steps
    save_model: bool = True
    profile: Profile = Profile.none
    rocprof: Rocprof = Rocprof.v3  # the profiler of profile=rocprof
    # rocprof=v3: hardware counters of each kernel, in place of a trace
    rocprof_counters: list[str] = checked(default_factory=list, text=COUNTER)
    debug: Debug = Debug.none  # for faults of the GPU and of torch.compile; slow
    # sequences per optimizer step on all ranks; sets gradient_accumulation_steps
    effective_batch: Optional[int] = checked(None, minimum=1, maximum=MAX_BATCH)
    # in any currency; adds the cost of the run to the plan
    price_per_gpu_hour: Optional[float] = checked(None, minimum=0, maximum=1_000_000_000)
    # of weights, row order and sampling; data.seed is that of generated problems
    seed: int = checked(0, minimum=0, below=2**32)
    name: Optional[str] = checked(None, text=NAME_OR_EMPTY)  # null: <method>-<model>-<hardware>
    run_root: str = "runs"  # directory of all runs
    user_env: dict[str, str] = field(default_factory=dict)  # variables that override the launcher's
    # by key of result.json, or <key of metrics.jsonl>@<step>
    targets: dict[str, Target] = field(default_factory=dict)
    # a pipeline: runs that start from the results of earlier ones
    phases: list[Phase] = field(default_factory=list)
    # a pipeline: at the end, test this machine with the doctor, and write hardware_report.json
    hardware_report: bool = False
