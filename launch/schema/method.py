"""Define the part of the schema for a method: its program, arguments and rewards."""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from launch.schema.checked import REGEX, checked
from launch.schema.data import LrScaling, Selection
from launch.schema.enums import Head, Reference, Rows, Use


@dataclass
class Sandbox:
    """Limits of reward `code_tests` for one completion's code, over all of its tests.

    The code runs in containers of image `sandbox`.
    """

    # containers; each runs the code of one completion at a time, on one core
    workers: int = checked(4, least=1)
    time_s: float = checked(10.0, least=0.1)  # wall-clock time, including compilation
    memory_gb: float = checked(0.5, least=0.1)
    processes: int = checked(64, least=8)
    # what a program writes to stdout, and the largest file that it may write
    output_kb: int = checked(64, least=1)
    disk_mb: int = checked(64, least=1)  # /tmp, which is in memory and counts as memory


@dataclass
class Properties:
    """Facts about a method's program, which the launcher reads instead of the method's name.

    A run's identity does not include these keys, because they follow from the program.
    """

    rows: Optional[str] = None  # row format, one of FORMATS in recipes/data/data_check.py
    prepares_rows: bool = False  # uses PreparedRows: tokens are cached, data.preview shows them
    examples_per_row: int = 1  # 2: each side of a pair is a separate example
    sequences_per_example: int = 1  # 2: the two sides of a pair are compared
    row_layouts: list[Rows] = field(default_factory=list)  # for step.rows, in addition to padded
    # a step's loss does not depend on its micro-batches, so speed=auto may choose them
    batch_invariant: bool = False
    curriculum: bool = False  # data.curriculum orders its rows
    generates: bool = False  # samples completions while it trains: topology=split and colocate
    reference: Reference = Reference.none
    head: Head = Head.tiled
    held_out_metrics: dict[str, bool] = field(default_factory=dict)  # -> whether larger is better
    uses_rewards: Use = Use.none
    leaves_samples: bool = False  # for a later phase that trains on them
    starts_vllm: bool = False  # inside the rank's process group, for any method.args.engine


@dataclass
class Method(Properties):
    """A recipe program and the arguments of its configuration class."""

    name: str = MISSING
    program: str = MISSING  # module of recipes/ that every rank runs
    # trainer, evaluator, exporter, bench, tune, or cycles (several phases)
    kind: str = checked(words=("trainer", "evaluator", "exporter", "bench", "tune", "cycles"))
    config_class: str = MISSING  # the class that `args` are checked against, as module.Class
    args: dict[str, Any] = field(default_factory=dict)
    lr_scaling: LrScaling = LrScaling.none  # how the learning rate follows the batch
    # sequences per step for which the learning rate was chosen
    lr_reference_batch: Optional[int] = checked(None, least=1)
    # keep the best model by one of held_out_metrics rather than the last
    selection: Selection = field(default_factory=Selection)
    rewards: dict[str, float] = field(default_factory=dict)  # reward name or dotted path -> weight
    # each of these rewards runs only if the one before it gave 1; otherwise it is 0
    reward_chain: list[str] = field(default_factory=list)
    # for reward `regex`, if rows have no column `pattern`
    reward_pattern: Optional[str] = checked(None, text=REGEX)
    # run the user's reward functions, too, in a process next to the rank; false: in the rank, for a
    # function that needs its GPU
    reward_confined: bool = True
    sandbox: Sandbox = field(default_factory=Sandbox)
    # supported topologies, the one for a single GPU first; empty: those of a trainer
    topologies: list[str] = field(default_factory=list)
    uses_model: bool = True  # false: a benchmark of the machine, which reads no data either
    uses_precision: bool = True  # false: a benchmark whose rows name their own precisions
    takes_adapter: bool = False  # a benchmark that trains an adapter; trainers always do
    # arguments under smoke=true that replace the usual small sizes
    smoke: dict[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.kind == "trainer"

    @property
    def measures_model(self) -> bool:
        return self.kind == "evaluator" and not self.leaves_samples

    @property
    def exports(self) -> bool:
        return self.kind == "exporter"

    @property
    def tunes(self) -> bool:
        return self.kind == "tune"

    @property
    def measures_machine(self) -> bool:
        """Return whether this is a benchmark or a tuning, which runs many benchmarks."""
        return self.kind in ("bench", "tune")

    @property
    def has_cycles(self) -> bool:
        """Return whether the method consists of cycles of several phases, each with its own run."""
        return self.kind == "cycles"

    def reads(self, group: str) -> bool:
        """Return whether the program reads this group of conf/. If not, its keys are rejected."""
        return {
            "model": self.uses_model,
            "precision": self.uses_precision,
            "data": self.kind != "bench",
        }.get(group, True)
