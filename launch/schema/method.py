"""Define the schema of a method: its program, arguments and rewards."""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from launch.schema.checked import REGEX, checked
from launch.schema.data import LrScaling, Selection
from launch.schema.enums import Head, Reference, Rows, Use


@dataclass
class Sandbox:
    """Limits of the reward `code_tests` for the code of one completion, over all of its tests.

    The code runs in containers of the image `sandbox`.
    """

    # number of containers; each runs the code of one completion at a time on one core
    workers: int = checked(4, minimum=1)
    # wall-clock time of code with one test, including compilation; each further test adds a tenth
    # of it, up to six times the value
    time_s: float = checked(10.0, minimum=0.1)
    memory_gb: float = checked(0.5, minimum=0.1)  # including /tmp
    processes: int = checked(64, minimum=8)  # including threads
    # size of the standard output, and of the largest file
    output_kb: int = checked(64, minimum=1)
    disk_mb: int = checked(64, minimum=1)  # size of /tmp, which is part of memory_gb


@dataclass
class Properties:
    """Facts about a method's program, so that the launcher does not depend on method names.

    They are not part of a run's identity, because they follow from the program.
    """

    rows: Optional[str] = None  # row format, one of FORMATS in launch/core/row_formats.py
    prepares_rows: bool = False  # uses PreparedRows, which caches tokens and supports data.preview
    examples_per_row: int = 1  # 2: each side of a pair is a separate example
    sequences_per_example: int = 1  # 2: the two sides of a pair are compared
    row_layouts: list[Rows] = field(default_factory=list)  # values of step.rows besides padded
    # The loss of a step does not depend on its micro-batches, so speed=auto may choose them.
    batch_invariant: bool = False
    curriculum: bool = False  # supports data.curriculum
    generates: bool = False  # samples completions during training; supports split and colocate
    reference: Reference = Reference.none
    head: Head = Head.tiled
    held_out_metrics: dict[str, bool] = field(default_factory=dict)  # name -> larger is better
    uses_rewards: Use = Use.none
    leaves_samples: bool = False  # writes samples that a later phase can train on
    starts_vllm: bool = False  # starts vLLM in its process group, for any method.args.engine


@dataclass
class Method(Properties):
    """A recipe program and the arguments of its configuration class."""

    name: str = MISSING
    program: str = MISSING  # module of recipes/ that every rank runs
    # trainer, evaluator, exporter, bench, tune, chat (in the terminal), service (until stopped), or
    # cycles (several phases)
    kind: str = checked(
        words=("trainer", "evaluator", "exporter", "bench", "tune", "chat", "service", "cycles")
    )
    config_class: str = MISSING  # class of `args`, as module.Class
    args: dict[str, Any] = field(default_factory=dict)
    lr_scaling: LrScaling = LrScaling.none
    # sequences per step that the learning rate was chosen for
    lr_reference_batch: Optional[int] = checked(None, minimum=1)
    selection: Selection = field(default_factory=Selection)
    rewards: dict[str, float] = field(default_factory=dict)  # reward name or dotted path -> weight
    # Each reward in this list is computed only if the previous one is 1. Otherwise it is 0.
    reward_chain: list[str] = field(default_factory=list)
    # pattern of the reward `regex`, for rows without a column `pattern`
    reward_pattern: Optional[str] = checked(None, text=REGEX)
    # run the user's reward functions in a separate process; false: in the rank, for functions that
    # need its GPU
    reward_confined: bool = True
    sandbox: Sandbox = field(default_factory=Sandbox)
    # supported topologies, single-GPU ones first; empty: the same as a trainer
    topologies: list[str] = field(default_factory=list)
    uses_model: bool = True  # false: a benchmark of the machine, which reads no data either
    uses_precision: bool = True  # false: a benchmark whose arguments contain the precisions
    takes_adapter: bool = False  # true: a benchmark that can train an adapter, as all trainers can
    # arguments under smoke=true, in place of the usual small sizes
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
        """Return whether the method is a benchmark, or a tuning method, which runs many of them."""
        return self.kind in ("bench", "tune")

    @property
    def has_cycles(self) -> bool:
        """Return whether the method is a series of cycles, whose phases are separate runs."""
        return self.kind == "cycles"

    @property
    def waits_for_user(self) -> bool:
        """Return whether the user ends the method: a chat, or a service."""
        return self.kind in ("chat", "service")

    def reads(self, group: str) -> bool:
        """Return whether the program uses a group of conf/. Keys of other groups are rejected."""
        return {
            "model": self.uses_model,
            "precision": self.uses_precision,
            "data": self.kind != "bench" and not self.waits_for_user,
        }.get(group, True)
