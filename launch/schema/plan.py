"""Define the types of a plan, which the planner returns and other packages execute or show."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.schema import Config, Target
from launch.schema.cycle_choice import CycleChoice


@dataclass(frozen=True)
class Plan:
    """One run. `config` is the composition that the processes read, after smoke=true."""

    name: str
    run_dir: Path
    config: Config
    trainer_args: dict[str, Any]
    processes: list[Process]
    containers: dict[str, ContainerSpec]  # by process; under runtime=local only the sandbox
    memory: list[Memory]
    speed: Speed
    warnings: list[str]
    tuned: dict[str, Any] | None = None  # the recipe that a tuning run executes
    data_cache: dict[str, str] | None = None  # the location of a training run's prepared rows
    data: dict[str, Any] | None = None  # statistics of the prepared rows
    chosen: CycleChoice | None = None  # for a phase of a RAFT run with method.selection
    # for a RAFT cycle that does not run, because earlier cycles stopped improving
    is_left_out: bool = False
    plain_speed: Speed | None = None  # speed without the choices of speed=auto
    balance: Balance | None = None  # for GRPO under topology=split
    # faster settings that change results; only mode=plan searches for them
    faster: list[Offer] = field(default_factory=list)
    # the same steps on fewer GPUs, also only in mode=plan
    cheaper: list[Offer] = field(default_factory=list)
    overrides: tuple[str, ...] = ()  # of the command

    @property
    def targets(self) -> dict[str, Target]:
        return self.config.targets


@dataclass(frozen=True)
class Process:
    """One process group: torchrun with its ranks, a server, preparation, a sandbox or a pause."""

    name: str
    kind: str  # trainer, evaluator, exporter, bench, tune, server, prepare, verifier or pause
    argv: list[str]
    settings: list[Setting]
    gpus: list[int]
    num_ranks: int = 1
    port: int | None = None  # port of a server on the loopback
    node: int = 0  # index of the node in a Slurm job
    # names of the shell's variables that the process inherits; [] for a container
    inherited: list[str] = field(default_factory=list)
    server: str = "127.0.0.1"  # address of the run's server

    @property
    def env(self) -> dict[str, str]:
        return {s.name: s.value for s in self.settings}


@dataclass(frozen=True)
class Setting:
    """An environment variable of a process; `origin` is hardware, launcher, image or yours."""

    name: str
    value: str
    reason: str
    origin: str


@dataclass(frozen=True)
class Mount:
    """A path of the host and its path in the container. They differ only for secrets."""

    source: str
    target: str
    read_only: bool
    reason: str


@dataclass(frozen=True)
class Confinement:
    """Isolation of untrusted code.

    Only `tmpfs` is writable. The container exits with our process, which is PID 1.
    """

    copies: int  # number of identical containers
    pids: int  # processes and threads in each
    cpus: float
    tmpfs: dict[str, str]  # path -> mount options
    sysctls: dict[str, str]


@dataclass(frozen=True)
class ContainerSpec:
    """The arguments of the container engine for one process group."""

    name: str
    image: str
    command: list[str]
    user: str  # uid:gid of the caller
    stop_timeout_s: int
    labels: dict[str, str]
    network: str = "none"
    ipc: str = "none"
    pid: str = "private"  # process namespace: private, or that of the pause container
    environment: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)  # path -> reason
    nvidia_gpus: list[int] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  # gids, or names in a plan for another machine
    mounts: list[Mount] = field(default_factory=list)
    shm_gb: float = 0.0
    memory_gb: float | None = None
    memlock: bool = False
    security_opt: list[str] = field(default_factory=lambda: ["no-new-privileges:true"])
    secrets: list[str] = field(default_factory=list)  # names of variables, without values
    # empty, because only root could use a capability
    cap_add: list[str] = field(default_factory=list)
    cap_drop: list[str] = field(default_factory=lambda: ["ALL"])
    confinement: Confinement | None = None  # for the sandbox
    stdin: bool = False  # the container reads the launcher's input, and exits when that closes
    tty: bool = False
    ports: dict[int, str] = field(default_factory=dict)  # published port -> address on the host
    # without an engine: the command of Apptainer or srun, which `command` follows
    prefix: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Memory:
    """Planned memory of one process on one of its GPUs; 1 GB is 1e9 bytes."""

    process: str
    gpu: int | None  # None: the host's memory
    parts_gb: dict[str, float]
    capacity_gb: float
    moment: str = ""  # the moment of training when a rank uses the most memory
    # additional memory that torch's allocator may hold in free pieces too small to reuse
    scattered_gb: float = 0.0
    error: float = 0.05  # share by which the use may exceed the plan

    @property
    def total_gb(self) -> float:
        return sum(self.parts_gb.values())

    @property
    def allocated_gb(self) -> float:
        """Return the part that torch.cuda.max_memory_allocated reports."""
        return self.total_gb - self.parts_gb.get("context", 0.0)

    @property
    def fits(self) -> bool:
        # a server fills its share exactly, apart from rounding
        return self.total_gb <= self.capacity_gb + 1e-6


@dataclass(frozen=True)
class Speed:
    """Predicted speed; None if it is unknown. `basis` explains the source of the estimate."""

    tokens_per_second: float | None
    step_s: float | None
    basis: str
    # training time with held-out passes, without startup; None if the rows have to be read first
    run_hours: float | None = None
    cost: float | None = None  # of the run's GPUs, in the currency of price_per_gpu_hour
    unit_cost: float | None = None  # of a million tokens; of 1,000 answers if the method generates
    # seconds of generation and training in a step of GRPO; with overlap they run concurrently
    generation_s: float | None = None
    training_s: float | None = None
    steps: int | None = None  # of the run, or batches of method=sample; None as for run_hours
    parts_s: dict[str, float] = field(default_factory=dict)  # of step_s, by kind of work
    is_upper_bound: bool = False  # of the time, because the lengths of rows are not known yet
    passes: int = 0  # over the held-out rows, to select the best model
    pass_s: float | None = None  # seconds of one of them; None if their number is unknown


@dataclass(frozen=True)
class Balance:
    """Seconds of generation and training per step, and the fastest split of GPUs between them."""

    generation_s: float
    training_s: float
    bound: str  # generation or training, whichever takes longer
    servers: int
    gain: float  # factor of tokens per second from the current split to the fastest
    sequences: int  # per step under the fastest split


@dataclass(frozen=True)
class Offer:
    """Overrides that make a run faster or cheaper."""

    overrides: list[str]  # to add to the command
    gain: float  # predicted factor of tokens per second
    price: str  # what the user gives up
    unit_cost: float | None = None  # as in Speed
