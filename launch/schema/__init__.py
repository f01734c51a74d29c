"""Define the typed configuration. Every YAML under conf/ is data for these classes.

Hydra merges the groups into `Config`, which rejects unknown keys and values of a wrong type. Units
are in the names: `_gb` is 1e9 bytes, `_gb_s` 1e9 bytes per second, `_tflops` 1e12 floating-point
operations per second. Only hardware.memory_gb counts GiB, as vendors do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import MISSING

from launch.schema.checked import DIVIDED, MOST_RANKS, NAME_OR_EMPTY, checked
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
    Speed,
    Vendor,
    When,
)
from launch.schema.host import Detect, Healthy, HostNeeds
from launch.schema.host import Inner as Inner
from launch.schema.host import Runtime as Runtime
from launch.schema.host import Slurm as Slurm
from launch.schema.method import Method as Method
from launch.schema.method import Properties as Properties
from launch.schema.method import Sandbox as Sandbox

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
    num_workers: int = checked(least=0)
    pin_memory: bool = MISSING


@dataclass
class Rocm:
    """ROCm versions that support a GPU; `max` is empty while the newest one does."""

    min: str = MISSING
    max: Optional[str] = None


@dataclass
class Hardware:
    """One kind of device and its usual node. `gpus_per_node` counts devices as torch sees them."""

    name: str = MISSING
    product: str = MISSING
    vendor: Vendor = MISSING
    gfx: str = MISSING  # compiler target: gfx942, sm_90, or cpu
    gpus_per_node: int = checked(least=1, most=MOST_RANKS)
    memory_gb: float = checked(least=1)  # GiB, as vendors count; plans show 1e9 bytes
    unified_memory: bool = False  # the GPU's memory is the host's memory
    bandwidth_gb_s: float = checked(least=1)
    compute_units: int = MISSING
    detect: Detect = field(default_factory=Detect)
    # dense, for fp32, tf32, fp16, bf16, fp8, fp4; a precision without a figure is left out
    peak_tflops: dict[str, float] = field(default_factory=dict)
    link: Link = Link.none
    link_gb_s: Optional[float] = None  # all links of one device, per direction
    hive: Optional[int] = None  # devices connected by these links; empty: the whole node
    # between two hives, per direction; it limits a ring over more devices than one hive
    hives_gb_s: Optional[float] = None
    precisions: list[str] = MISSING  # compute precisions, the preferred one first
    attention: str = checked(words=ATTENTION)  # attn_implementation of transformers
    # kernel that keeps packed rows apart: varlen, flash_attention_2, flex_attention or sdpa; empty:
    # rows are not packed
    packed_attention: Optional[str] = None
    fused_attention: bool = True  # torch has a kernel that never stores the scores
    compile: bool = True  # torch.compile works
    # compiled layers were verified on it; if not, the first micro-batch is computed both ways
    compile_measured: bool = False
    triton: bool = True  # the Triton version in our tests compiles for it without spills
    vllm: bool = True  # an image with vLLM exists for it
    dataloader: Dataloader = field(default_factory=Dataloader)
    env: dict[str, EnvVar] = field(default_factory=dict)
    rocm: Optional[Rocm] = None
    host: HostNeeds = field(default_factory=HostNeeds)
    healthy: Healthy = field(default_factory=Healthy)
    container: str = MISSING  # name of its image


@dataclass
class Model:
    """A model's shape, so that planning needs no download, and the location of its weights."""

    name: str = MISSING
    # model_type of transformers: qwen3, qwen2, llama
    architecture: str = checked(words=("qwen3", "qwen2", "llama"))
    hub_id: Optional[str] = None
    revision: Optional[str] = None  # a commit of the hub, 40 hexadecimal digits
    path: Optional[str] = None  # a local directory; wins over hub_id
    chat_template: Optional[str] = None  # Jinja file that replaces the tokenizer's template
    init: Init = Init.pretrained
    num_layers: int = checked(least=1)
    hidden_size: int = checked(least=1)
    intermediate_size: int = checked(least=1)
    num_heads: int = checked(least=1)
    num_kv_heads: int = checked(least=1)
    head_dim: int = checked(least=1)
    vocab_size: int = checked(least=1)
    tied_embeddings: bool = MISSING
    attention_bias: bool = False  # bias on the query, key and value projections
    max_positions: int = checked(least=1)
    rope_theta: float = MISSING
    rms_norm_eps: float = MISSING
    # as published or counted; a test recounts it from the shape
    num_parameters: int = checked(least=1)


@dataclass
class Adapter:
    name: str = MISSING
    rank: Optional[int] = checked(None, least=1)
    alpha: Optional[int] = checked(None, least=1)
    dropout: float = checked(0.0, least=0, below=1)
    # or a list of linear layers; PEFT silently skips unknown names in a list
    target_modules: Any = checked("all-linear", words=("all-linear", *LINEARS))
    rslora: bool = False
    dora: bool = False
    quantize_base: bool = False  # nf4 base weights under the adapter
    path: Optional[str] = None  # train this adapter further, of the same kind: <run>/adapter


@dataclass
class Precision:
    name: str = MISSING
    # dtype of matrix products: fp32, fp16, bf16, fp8
    compute: str = checked(words=("fp32", "fp16", "bf16", "fp8"))
    # dtype in which trained parameters are stored: fp32, bf16, nf4
    weights: str = checked(words=("fp32", "fp16", "bf16", "nf4"))


@dataclass
class Fsdp:
    # dtype in which gradients are summed over the ranks: fp32 or bf16
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
    # empty: all GPUs of the node, but one for single and colocate
    num_gpus: Optional[int] = checked(None, least=1, most=MOST_RANKS)
    strategy: str = checked(words=STRATEGIES)  # of the trainers: none, ddp, fsdp, zero2, zero3
    # split: number of model replicas that generate behind one address; auto: predicted fastest
    servers: Any = checked(0, least=0)
    server_tensor_parallel: int = checked(1, least=1)  # split: GPUs of one replica
    # split, and engine=vllm: share of a GPU's memory that vLLM may take
    server_memory_share: float = checked(0.9, above=0, most=1)
    # split, and engine=vllm: size of the KV cache, fixed rather than measured so that several vLLM
    # can start on one GPU at once
    server_cache_gb: Optional[float] = checked(None, least=0.001)
    # split: tokens of prompt and completion; empty: all positions of the model
    server_max_length: Optional[int] = checked(None, least=2)
    # split, colocate and engine=vllm: more arguments of vLLM's engine, such as
    # {max_num_seqs: 512}; null removes one
    server_args: dict[str, Any] = field(default_factory=dict)
    # split: true generates the next batch while this one trains; stream never stops generating
    # and trains on complete groups; empty: true where nothing rules it out
    overlap: Any = checked(None, words=(None, False, True, "stream"))
    # overlap=stream: most optimizer steps since a completion's weights; empty: the number of steps
    # that two generations serve
    max_staleness: Optional[int] = checked(None, least=0)
    numa_binding: Optional[NumaBinding] = None
    tensor_parallel: int = checked(1, least=1, most=1)  # of training
    pipeline_parallel: int = checked(1, least=1, most=1)  # of training
    fsdp: Fsdp = field(default_factory=Fsdp)
    zero: Zero = field(default_factory=Zero)


@dataclass
class Container:
    """An image of containers/images.lock.yaml by name, or `custom` with the user's reference."""

    name: str = MISSING
    reference: Optional[str] = None


@dataclass
class Tracking:
    name: str = checked(words=TRACKERS)
    package: Optional[str] = None  # required package; null: the one that the tracker's name implies
    project: Optional[str] = None


@dataclass
class Target:
    """A published or promised figure, shown next to the run's own."""

    value: float = MISSING
    source: str = MISSING


@dataclass
class Phase:
    """One run of a pipeline, as overrides on top of the experiment.

    A phase of method=raft stands for the phases of its cycles.
    """

    name: str = MISSING
    overrides: list[str] = field(default_factory=list)
    model_from: Optional[str] = None  # the earlier phase whose model it takes
    # an earlier phase of method=sample: train on its selected samples; DPO: on pairs of all of them
    data_from: Optional[str] = None
    # method=export: earlier evaluation of the same model, which the model card quotes
    results_from: Optional[str] = None


class Direction(Enum):
    minimize = "minimize"
    maximize = "maximize"


@dataclass
class Parameter:
    """The values of one key that a search tries: a list, or a range that includes both ends."""

    key: str = MISSING  # a key or a group, as on the command line
    values: Optional[list[Any]] = None
    low: Optional[float] = None
    high: Optional[float] = None
    log: bool = False  # uniform in the logarithm
    integer: bool = False  # whole numbers only


@dataclass
class Sweep:
    """The search of `-m sweep=NAME`. `none` sweeps the lists of values on the command line."""

    name: str = "none"
    overrides: list[str] = field(default_factory=list)  # for all trials; the command line wins
    space: dict[str, Parameter] = field(default_factory=dict)
    metric: Optional[str] = None  # key of result.json, or of the last line of metrics.jsonl
    direction: Direction = Direction.minimize
    num_trials: int = 20  # spaces of lists with at most this many combinations are tried completely
    # trials at once; empty: as many as fit on the GPUs, one on a machine without GPUs
    parallel: Optional[int] = None


@dataclass
class Step:
    """Settings that change the speed of an optimizer step but not its result.

    speed=auto chooses the keys left null; speed=off uses the defaults of TRL.
    """

    compile: Optional[bool] = None  # compile each decoder layer (torch regional compilation)
    rows: Optional[Rows] = None
    # with method.args.gradient_checkpointing: recompute only the first layers, this many; null: all
    checkpointed_layers: Optional[int] = checked(None, least=1)


@dataclass
class Choice:
    """A value that speed=auto chose over the default. `before` is null if there was no default."""

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

    speed: Speed = Speed.auto  # auto: the planner sets what keeps a step's result
    # keys that speed=auto leaves alone, in addition to those that the user set
    speed_keeps: list[str] = field(default_factory=list)
    # the choices of speed=auto; set by a plan and kept in a record, never set by users
    chosen: list[Choice] = field(default_factory=list)
    mode: Mode = Mode.run
    find: Find = Find.none  # what mode=plan searches for with the memory planner
    format: Format = Format.text
    verbose: bool = False  # the text plan shows full command lines and environments
    smoke: bool = False
    # keys that smoke=true does not change, in addition to those of the command line
    smoke_keeps: list[str] = field(default_factory=list)
    preflight: Preflight = Preflight.refuse
    resume: str = "auto"  # auto, never, or a run directory
    save_model: bool = True  # false for measurements: saving 8B takes longer than a few steps
    profile: Profile = Profile.none
    rocprof: Rocprof = Rocprof.v3  # the program of profile=rocprof
    debug: Debug = Debug.none
    # sequences per optimizer step; sets the accumulation
    effective_batch: Optional[int] = checked(None, least=1, most=DIVIDED)
    # in any currency, for the run's cost in the plan
    price_per_gpu_hour: Optional[float] = checked(None, least=0, most=1_000_000_000)
    seed: int = checked(0, least=0, below=2**32)
    name: Optional[str] = checked(None, text=NAME_OR_EMPTY)  # empty: <method>-<model>-<hardware>
    run_root: str = "runs"
    user_env: dict[str, str] = field(default_factory=dict)  # environment variables; these win
    targets: dict[str, Target] = field(default_factory=dict)  # by key of result.json
    phases: list[Phase] = field(default_factory=list)
