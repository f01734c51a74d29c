"""Define the types of a plan, which the planner makes and other rooms run or show."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.schema import Config, Target
from launch.schema.cycle_choice import OfCycle


@dataclass(frozen=True)
class Plan:
    """One run. `config` is the composition that its processes read, with smoke=true applied."""

    name: str
    run_dir: Path
    config: Config
    trainer_args: dict[str, Any]
    processes: list[Process]
    containers: dict[str, ContainerSpec]  # by process; under runtime=local only the sandbox's
    memory: list[Memory]
    speed: Speed
    warnings: list[str]
    tuned: dict[str, Any] | None = None  # for a tuning: the recipe that it runs
    data_cache: dict[str, str] | None = None  # for a training: location of its prepared rows
    data: dict[str, Any] | None = None  # figures of the prepared rows
    chosen: OfCycle | None = None  # for a phase of a RAFT that chooses its cycle
    plain_speed: Speed | None = None  # speed of the same training without the choices of speed=auto
    balance: Balance | None = None  # for GRPO under topology=split
    # faster settings that change results; only mode=plan searches for them
    faster: list[Offer] = field(default_factory=list)
    overrides: tuple[str, ...] = ()  # overrides of the command

    @property
    def is_left_out(self) -> bool:
        """Return whether this RAFT cycle never starts because earlier ones stopped improving."""
        return self.chosen is not None and self.chosen.is_left_out

    @property
    def targets(self) -> dict[str, Target]:
        return self.config.targets


@dataclass(frozen=True)
class Process:
    """One process group: a server, torchrun with its ranks, their preparation, or the sandbox."""

    name: str
    kind: str  # trainer, evaluator, exporter, bench, tune, server, prepare or verifier
    argv: list[str]
    settings: list[Setting]
    gpus: list[int]
    num_ranks: int = 1
    port: int | None = None  # port on which a server listens, on its loopback
    node: int = 0  # index of its node in a Slurm job

    @property
    def env(self) -> dict[str, str]:
        return {s.name: s.value for s in self.settings}


@dataclass(frozen=True)
class Setting:
    """One environment variable of one process; `origin` is hardware, launcher or yours."""

    name: str
    value: str
    reason: str
    origin: str


@dataclass(frozen=True)
class Mount:
    """A path of the host. It is the same in the container, except for secrets."""

    source: str
    target: str
    read_only: bool
    reason: str


@dataclass(frozen=True)
class Confinement:
    """Isolation for untrusted code.

    Only `tmpfs` is writable, the first process is ours, and the container ends with it.
    """

    copies: int  # number of such containers
    pids: int  # processes and threads in each
    cpus: float
    tmpfs: dict[str, str]  # path -> mount options
    sysctls: dict[str, str]


@dataclass(frozen=True)
class ContainerSpec:
    """Everything that the engine needs for one process group's container."""

    name: str
    image: str
    command: list[str]
    user: str  # uid:gid of the caller
    stop_timeout_s: int
    labels: dict[str, str]
    network: str = "none"
    ipc: str = "none"
    pid: str = "private"  # process namespace: private, or the server's
    environment: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)  # path -> reason
    nvidia_gpus: list[int] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  # gids; names in a plan for another machine
    mounts: list[Mount] = field(default_factory=list)
    shm_gb: float = 0.0
    memory_gb: float | None = None
    memlock: bool = False
    security_opt: list[str] = field(default_factory=lambda: ["no-new-privileges:true"])
    secrets: list[str] = field(default_factory=list)  # only their names
    # empty, because the caller is not root and could not use a capability
    cap_add: list[str] = field(default_factory=list)
    cap_drop: list[str] = field(default_factory=lambda: ["ALL"])
    confinement: Confinement | None = None  # for the sandbox


@dataclass(frozen=True)
class Memory:
    """Planned memory of one process on one of its GPUs; 1 GB is 1e9 bytes."""

    process: str
    gpu: int | None  # None: the host's memory
    parts_gb: dict[str, float]
    capacity_gb: float
    moment: str = ""  # the moment of training at which a rank uses most memory
    # more memory that torch's allocator may hold, free but in pieces too small to reuse
    scattered_gb: float = 0.0

    @property
    def total_gb(self) -> float:
        return sum(self.parts_gb.values())

    @property
    def allocated_gb(self) -> float:
        """Return the part that torch.cuda.max_memory_allocated counts."""
        return self.total_gb - self.parts_gb.get("context", 0.0)

    @property
    def fits(self) -> bool:
        # a server fills its share exactly, apart from rounding
        return self.total_gb <= self.capacity_gb + 1e-6


@dataclass(frozen=True)
class Speed:
    """Predicted speed; None if it cannot be predicted. `basis` names the source of the figures."""

    tokens_per_second: float | None
    step_s: float | None
    basis: str
    # training without startup and evaluation; None if it depends on data that is not read
    run_hours: float | None = None
    cost: float | None = None  # of the run's GPUs, in the currency of price_per_gpu_hour
    # seconds of both halves of a step that generates; with overlap they run at once
    generation_s: float | None = None
    training_s: float | None = None


@dataclass(frozen=True)
class Balance:
    """Seconds of both halves of a step, and the fastest split of the GPUs between them."""

    generation_s: float
    training_s: float
    bound: str  # generation or training, whichever takes longer
    servers: int
    gain: float  # tokens per second of the fastest split; 1.2: a fifth more than now
    sequences: int  # per step of the fastest split


@dataclass(frozen=True)
class Offer:
    """Overrides that make a run faster, and their cost."""

    overrides: list[str]  # to add to the command
    gain: float  # predicted tokens per second relative to the run; 1.2 means a fifth more
    price: str
