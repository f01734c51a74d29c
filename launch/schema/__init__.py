"""The one typed definition of a configuration. Every YAML under conf/ is data for these classes.

Hydra merges the groups into `Config`; a key that is not here, or a value of another type, is refused wherever it stands.
Units are in the names: `_gb` is 1e9 bytes (hardware.memory_gb GiB, as makers count), `_gb_s` 1e9 bytes per second, `_tflops` 1e12
floating-point operations per second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import MISSING

from launch.schema.data import Balance, Curriculum, CurriculumArgs, Deduplicate, Filter, LrScaling, Selection, Source
from launch.schema.enums import (
    Debug,
    Find,
    Format,
    Init,
    Link,
    Mode,
    Network,
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


@dataclass
class EnvVar:
    """An environment variable with the reason for its value and the source of that reason."""

    value: str = MISSING
    reason: str = MISSING
    source: str = MISSING
    when: When = When.always


@dataclass
class Dataloader:
    num_workers: int = MISSING
    pin_memory: bool = MISSING


@dataclass
class Rocm:
    """Versions of ROCm that serve a GPU; `max` is empty while the newest still does."""

    min: str = MISSING
    max: Optional[str] = None


@dataclass
class Hardware:
    """One device of a kind, and how a node of them is usually built. `gpus_per_node` counts devices as torch sees them."""

    name: str = MISSING
    product: str = MISSING
    vendor: Vendor = MISSING
    gfx: str = MISSING  # compiler target: gfx942, sm_90, or cpu
    gpus_per_node: int = MISSING
    memory_gb: float = MISSING  # GiB, as makers count; plans show 1e9 bytes
    unified_memory: bool = False  # the GPU's memory is the host's memory
    bandwidth_gb_s: float = MISSING
    compute_units: int = MISSING
    detect: Detect = field(default_factory=Detect)
    peak_tflops: dict[str, float] = field(default_factory=dict)  # dense; fp32, tf32, fp16, bf16, fp8, fp4; absent where there is none
    link: Link = Link.none
    link_gb_s: Optional[float] = None  # all links of one device, per direction
    hive: Optional[int] = None  # devices that have these links to one another; empty: all of the node
    hives_gb_s: Optional[float] = None  # between two hives, per direction: a ring over more devices than one hive goes at this pace
    precisions: list[str] = MISSING  # what it computes in, the preferred one first
    attention: str = MISSING  # attn_implementation of transformers
    packed_attention: Optional[str] = None  # keeps packed rows apart: varlen, flash_attention_2, flex_attention, sdpa; empty: no packing
    fused_attention: bool = True  # torch has a kernel that never writes the scores
    compile: bool = True  # torch.compile works
    compile_measured: bool = False  # compiled layers were seen right on it; else the first micro-batch is computed both ways
    triton: bool = True  # the Triton of our tests compiles for it, without spills
    vllm: bool = True  # an image with vLLM exists for it
    dataloader: Dataloader = field(default_factory=Dataloader)
    env: dict[str, EnvVar] = field(default_factory=dict)
    rocm: Optional[Rocm] = None
    host: HostNeeds = field(default_factory=HostNeeds)
    healthy: Healthy = field(default_factory=Healthy)
    container: str = MISSING  # the image that serves it


@dataclass
class Model:
    """A model's shape (so that planning needs no download) and where its weights come from."""

    name: str = MISSING
    architecture: str = MISSING  # model_type of transformers: qwen3, qwen2, llama
    hub_id: Optional[str] = None
    revision: Optional[str] = None  # a commit of the hub, 40 hexadecimal digits
    path: Optional[str] = None  # a local directory; wins over hub_id
    chat_template: Optional[str] = None  # a file in Jinja; in place of the tokenizer's own
    init: Init = Init.pretrained
    num_layers: int = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    vocab_size: int = MISSING
    tied_embeddings: bool = MISSING
    attention_bias: bool = False  # bias on the query, key and value projections
    max_positions: int = MISSING
    rope_theta: float = MISSING
    rms_norm_eps: float = MISSING
    num_parameters: int = MISSING  # as published or counted; a test recounts it from the shape


@dataclass
class Sandbox:
    """What reward `code_tests` gives the code of one completion, all of its tests together; in containers of image `sandbox`."""

    workers: int = 4  # containers, each of which runs one completion's code at a time, on one core
    time_s: float = 10.0  # of the wall's clock, compiling included
    memory_gb: float = 0.5
    processes: int = 64
    output_kb: int = 64  # what a program writes to stdout, and the largest file that it may write
    disk_mb: int = 64  # /tmp, which is memory and counts as such


@dataclass
class Method:
    """A recipe program and the arguments of its own configuration class."""

    name: str = MISSING
    program: str = MISSING  # module of recipes/, run by every rank
    kind: str = MISSING  # trainer, evaluator, exporter, bench, tune, or cycles: of phases
    config_class: str = MISSING  # the class `args` are checked against, as module.Class
    args: dict[str, Any] = field(default_factory=dict)
    lr_scaling: LrScaling = LrScaling.none  # of the learning rate with the batch
    lr_reference_batch: Optional[int] = None  # sequences of the step that the learning rate was chosen for
    selection: Selection = field(default_factory=Selection)  # sft, dpo, grpo, raft: the best model by held-out rows, in place of the last
    rewards: dict[str, float] = field(default_factory=dict)  # grpo, sample, raft, evaluate: named reward or dotted path -> weight
    reward_chain: list[str] = field(default_factory=list)  # of these rewards each is asked only where the one before gave 1; else it is 0
    reward_pattern: Optional[str] = None  # of reward `regex`, for rows without a column `pattern`
    reward_confined: bool = True  # functions of your own too in a process beside the rank; false: in it, for one that needs its GPU
    sandbox: Sandbox = field(default_factory=Sandbox)
    topologies: list[str] = field(default_factory=list)  # those it runs under, the one for a single GPU first; empty: a trainer's
    uses_model: bool = True  # false: a benchmark of the machine; none of them reads data
    uses_precision: bool = True  # false: a benchmark whose rows name their own
    takes_adapter: bool = False  # a benchmark that trains one; trainers always do
    smoke: dict[str, Any] = field(default_factory=dict)  # arguments under smoke=true, where other sizes than the usual ones are needed

    def reads(self, group: str) -> bool:
        """Whether its programs look at this group of conf/; what is given there otherwise is refused."""
        return {"model": self.uses_model, "precision": self.uses_precision, "data": self.kind != "bench"}.get(group, True)


@dataclass
class Adapter:
    name: str = MISSING
    rank: Optional[int] = None
    alpha: Optional[int] = None
    dropout: float = 0.0
    target_modules: Any = "all-linear"  # or a list of linear layers, of shapes.LINEARS
    rslora: bool = False
    dora: bool = False
    quantize_base: bool = False  # nf4 base weights under the adapter
    path: Optional[str] = None  # an adapter to train on, of the same kind: <run>/adapter


@dataclass
class Precision:
    name: str = MISSING
    compute: str = MISSING  # dtype of matrix products: fp32, fp16, bf16, fp8
    weights: str = MISSING  # dtype the trained parameters are kept in: fp32, bf16, nf4
    loss_scaling: bool = False


@dataclass
class Fsdp:
    reduce_dtype: str = "fp32"  # fp32 or bf16: what gradients are summed in over the ranks
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    state_dict_type: str = "SHARDED_STATE_DICT"


@dataclass
class Zero:
    offload_optimizer: bool = False
    offload_parameters: bool = False


@dataclass
class Topology:
    """How processes sit on GPUs. `num_gpus` empty: every GPU of the node (one for `single` and `colocate`)."""

    name: str = MISSING
    num_gpus: Optional[int] = None
    strategy: str = MISSING  # of the trainers: none, ddp, fsdp, zero2, zero3
    servers: Any = 0  # split: replicas of the model that generate, behind one address; auto: as many as are predicted to be fastest
    server_tensor_parallel: int = 1  # split: GPUs of one replica
    server_memory_share: float = 0.9  # split, and engine=vllm: of a GPU's memory, that vLLM may take
    server_cache_gb: Optional[float] = (
        None  # as the share: of keys and values, unmeasured, so that several vLLM may start on one GPU at once
    )
    server_max_length: Optional[int] = None  # split: tokens of prompt and completion; empty: all positions of the model
    # split, colocate and engine=vllm: further arguments of vLLM's engine, as {max_num_seqs: 512}; null leaves one out
    server_args: dict[str, Any] = field(default_factory=dict)
    # split: generate the next batch while this one trains; stream: never stop generating, and train on the groups that are whole
    overlap: Any = False
    # overlap=stream: how many optimizer steps old a completion may be; empty: as many as two generations serve
    max_staleness: Optional[int] = None
    numa_binding: Optional[NumaBinding] = None
    tensor_parallel: int = 1  # of training: refused unless 1
    pipeline_parallel: int = 1  # of training: refused unless 1
    fsdp: Fsdp = field(default_factory=Fsdp)
    zero: Zero = field(default_factory=Zero)


@dataclass
class Task:
    """A task of reasoning-gym or code_tasks.py; `level` sets every attribute of its curriculum, `config` any field of its own on top."""

    name: str = MISSING
    level: int = 0
    weight: float = 1.0
    worked: float = 0.0  # share of its training rows whose answer comes after its working, in <think>: data=cups
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    """The rows of a run. What does not fit together is refused by launch/rules/data.py."""

    name: str = MISSING
    kind: str = MISSING  # reasoning, code, jsonl, hub, mix or samples
    tasks: list[Task] = field(default_factory=list)
    num_train: Optional[int] = None  # reasoning: problems to generate
    num_heldout: int = 0  # reasoning: problems that are never trained on
    seed: int = 0  # reasoning: of the held-out problems, so that every run is measured on the same ones
    path: Optional[str] = None  # jsonl: file to train on
    heldout_path: Optional[str] = None
    hub_id: Optional[str] = None
    revision: Optional[str] = None
    split: str = "train"
    heldout_split: Optional[str] = None
    limit: Optional[int] = None  # the first rows only, of those that filters leave; evaluate: of the held-out ones
    sources: list[Source] = field(default_factory=list)  # mix: files and data sets of the hub
    filter: Filter = field(default_factory=Filter)
    deduplicate: Deduplicate = Deduplicate.none
    heldout_fraction: Optional[float] = None  # of the rows, by a hash of their question: never trained on
    balance: Balance = Balance.none
    pairs_per_prompt: int = 1  # samples: preference pairs of a prompt at most
    pairs_of_any: bool = False  # samples: sides need not differ in score, nor have ended; set by smoke=true
    streaming: bool = False  # read rows as they are needed; for data larger than memory
    shuffle_buffer: int = 1000  # streaming: rows among which the next one is drawn
    curriculum: Curriculum = Curriculum.none
    curriculum_args: CurriculumArgs = field(default_factory=CurriculumArgs)
    pass_rates: Optional[str] = None  # adaptive: a result.json with by_level, of an evaluation or of sampling
    chat_template: Optional[str] = None  # a file in Jinja; in place of the tokenizer's own
    cache: Optional[str] = None  # directory of prepared rows; empty: the user's cache
    preview: int = 0  # show so many rows as the model will see them, and end


@dataclass
class Container:
    """An image of containers/images.lock.yaml by its name, or `custom` with a reference of the user's own."""

    name: str = MISSING
    reference: Optional[str] = None


class Inner(Enum):
    """What starts the processes of a Slurm job on their node."""

    local = "local"
    docker = "docker"


@dataclass
class Slurm:
    """What runtime=slurm asks of Slurm, and what the nodes of a job talk over. Counts are of one node unless they say otherwise."""

    nodes: int = 1
    inner: Inner = Inner.local
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    time: Optional[str] = None  # as sbatch takes it: minutes, hours:minutes:seconds, days-hours ...
    gres: str = "gpu"  # the cluster's name for the GPUs, with their type where it asks for one: gpu:mi300x
    options: list[str] = field(default_factory=list)  # further options of sbatch, each `--name` or `--name=value`
    python: Optional[str] = None  # of the environment on the nodes; empty: the launcher's own
    early_signal_s: int = 360  # before the time is over Slurm says so; the run saves and ends
    requeue: bool = True  # back into the queue when it was interrupted, to go on from its checkpoint
    wait: bool = False  # follow the job to its end, and end with its exit code
    rendezvous_timeout_s: int = 600  # how long the nodes wait for one another
    interface: Optional[str] = None  # several nodes: the network interface they reach each other by
    hca: Optional[str] = None  # RDMA adapters as NCCL_IB_HCA names them; empty: RCCL takes all it finds
    gid_index: Optional[int] = None  # RoCE: the row of the port's GID table


@dataclass
class Runtime:
    """Where processes start. From `network` to `secrets` the keys are for docker."""

    name: str = MISSING
    stop_timeout_s: int = 300  # from SIGTERM to SIGKILL: longer than the slowest save
    hang_timeout_s: int = 1200  # without a step, a token or load progress; then stacks are taken and the run stopped
    max_restarts: int = 0  # after a failure or a hang, from the newest whole checkpoint
    network: Optional[Network] = None
    shm_gb: Optional[float] = None  # /dev/shm of a process group
    memory_gb: Optional[float] = None  # host memory of a process group; empty: no limit
    infiniband: bool = False  # pass /dev/infiniband
    secrets: list[str] = field(default_factory=list)  # variables of the shell that become files in the container
    slurm: Slurm = field(default_factory=Slurm)

    @property
    def on_node(self) -> str:
        """What starts a process on its machine, local or docker: under runtime=slurm the inner runtime."""
        return self.slurm.inner.name if self.name == "slurm" else self.name


@dataclass
class Tracking:
    name: str = MISSING
    package: Optional[str] = None  # what must be installed; null: what the name asks for
    project: Optional[str] = None


@dataclass
class Target:
    """A published or promised figure that a run's own is shown beside."""

    value: float = MISSING
    source: str = MISSING


@dataclass
class Phase:
    """One run of a pipeline: overrides on top of the experiment. `model_from` names an earlier phase whose model it takes, `data_from`
    one of method=sample whose samples it trains on: the selected ones, for DPO pairs of all. A phase of method=raft stands for those of
    its cycles. `results_from`, for method=export: an earlier evaluation of the same model, which the model card quotes."""

    name: str = MISSING
    overrides: list[str] = field(default_factory=list)
    model_from: Optional[str] = None
    data_from: Optional[str] = None
    results_from: Optional[str] = None


class Direction(Enum):
    minimize = "minimize"
    maximize = "maximize"


@dataclass
class Parameter:
    """The values of one key that a search tries: those of a list, or a range with both ends in it."""

    key: str = MISSING  # a key or a group, as on the command line
    values: Optional[list[Any]] = None
    low: Optional[float] = None
    high: Optional[float] = None
    log: bool = False  # uniform in the logarithm
    integer: bool = False  # whole numbers only


@dataclass
class Sweep:
    """What `-m sweep=NAME` searches. `none`: the command line's own lists of values are the sweep."""

    name: str = "none"
    overrides: list[str] = field(default_factory=list)  # of every trial; the command line's own win
    space: dict[str, Parameter] = field(default_factory=dict)
    metric: Optional[str] = None  # a figure of result.json, or of the last line of metrics.jsonl
    direction: Direction = Direction.minimize
    num_trials: int = 20  # a space of lists with no more combinations than this is tried whole
    parallel: Optional[int] = None  # trials at once; empty: as many as the GPUs hold, one where there is none


@dataclass
class Step:
    """How one optimizer step is computed: what changes its speed and not its result. null: speed=auto chooses; under speed=off the
    plain way."""

    compile: Optional[bool] = None  # each decoder layer compiled by itself (torch regional compilation)
    rows: Optional[Rows] = None
    checkpointed_layers: Optional[int] = (
        None  # under method.args.gradient_checkpointing: how many layers recompute, the first ones; null: all
    )


@dataclass
class Choice:
    """What speed=auto put in place of a default. `before` is null where nothing had been there."""

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

    speed: Speed = Speed.auto  # auto: the planner chooses what changes a step's speed and not its result
    speed_keeps: list[str] = field(default_factory=list)  # keys that speed=auto leaves as they are; all that somebody gave are added
    chosen: list[Choice] = field(default_factory=list)  # what it chose: a plan's, which a record keeps and nobody gives
    mode: Mode = Mode.run
    find: Find = Find.none  # mode=plan: search with the memory planner
    format: Format = Format.text
    verbose: bool = False  # the text plan shows full command lines and environments
    smoke: bool = False
    smoke_keeps: list[str] = field(default_factory=list)  # keys that smoke=true leaves as they are; those of the command line are added
    preflight: Preflight = Preflight.refuse
    resume: str = "auto"  # auto, never, or a run directory
    save_model: bool = True  # false: a measurement, whose trained model nobody wants: saving 8B takes longer than a few steps
    profile: Profile = Profile.none
    rocprof: Rocprof = Rocprof.v3  # under profile=rocprof: the program
    debug: Debug = Debug.none
    effective_batch: Optional[int] = None  # sequences of one optimizer step; the accumulation follows from it
    price_per_gpu_hour: Optional[float] = None  # in any currency: the plan then says what the run costs
    seed: int = 0
    name: Optional[str] = None  # empty: <method>-<model>-<hardware>
    run_root: str = "runs"
    user_env: dict[str, str] = field(default_factory=dict)  # environment variables of the user's own; they win
    targets: dict[str, Target] = field(default_factory=dict)  # keys of result.json
    phases: list[Phase] = field(default_factory=list)
