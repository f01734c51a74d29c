"""Define the parts of the schema that choose and order a run's rows and select its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import MISSING

from launch.schema.checked import REGEX, checked


class Deduplicate(Enum):
    """Rows that are dropped as equal to an earlier row."""

    none = "none"
    exact = "exact"  # equal in every character that a trainer reads
    normalized = "normalized"  # equal apart from case, spaces and Unicode normalization


class Balance(Enum):
    """The field whose values are made equally frequent."""

    none = "none"
    task = "task"
    level = "level"


class Curriculum(Enum):
    """Change of the shares of levels: per step in sft and grpo, per cycle in sample and raft."""

    none = "none"  # in the order of the rows
    progressive = "progressive"  # one level after another
    mixed = "mixed"  # like progressive, with a share of earlier levels
    adaptive = "adaptive"  # mostly the level whose answers are correct half of the time


class LrScaling(Enum):
    """Scaling of the learning rate with the number of sequences in a step."""

    none = "none"
    linear = "linear"  # arXiv:1706.02677, for SGD
    sqrt = "sqrt"  # arXiv:2205.10287, for Adam


@dataclass
class Selection:
    """Choice of the resulting model by a metric of held-out rows.

    sft, dpo, grpo: one of the saved models; every save is evaluated. raft: the model of one of the
    cycles, by the evaluation after each cycle.
    """

    # one of method.held_out_metrics, such as eval_loss; empty: keep the last model
    metric: Optional[str] = None
    # stop after this many evaluations in a row without improvement; empty: run all steps
    patience: Optional[int] = checked(None, least=1)
    # for patience: an improvement of at most this much does not count
    min_delta: float = checked(0.0, least=0)


@dataclass
class CurriculumArgs:
    # mixed: share of rows from earlier levels, divided equally
    earlier: float = checked(0.3, least=0, below=1)
    # adaptive: least weight of a level; a level that is correct half of the time weighs 0.25
    floor: float = checked(0.05, above=0, below=1)
    # adaptive, grpo: weight of the old pass rate when a new batch is scored
    memory: float = checked(0.9, least=0, below=1)


@dataclass
class Source:
    """A part of data=mix: a local file or a hub dataset. The weights of all parts sum to 1."""

    path: Optional[str] = None
    hub_id: Optional[str] = None
    revision: Optional[str] = None
    split: str = "train"
    weight: float = checked(above=0)


@dataclass
class Filter:
    """Conditions on a row; the first that fails drops it. Lengths are in tokens."""

    tasks: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    equals: dict[str, Any] = field(default_factory=dict)  # field -> value
    # field -> pattern to search for in it
    regex: dict[str, str] = checked(default_factory=dict, text=REGEX)
    # of prompt and completion; grpo: of the prompt
    min_tokens: Optional[int] = checked(None, least=0)
    max_tokens: Optional[int] = checked(None, least=1)
    max_prompt_tokens: Optional[int] = checked(None, least=1)


@dataclass
class Task:
    """A task of reasoning-gym or code_tasks.py.

    `level` sets every attribute of its curriculum; `config` sets any of its fields on top.
    """

    name: str = MISSING
    level: int = 0
    weight: float = checked(1.0, above=0)
    # share of training rows that show their working in <think> before the answer (data=cups)
    worked: float = checked(0.0, least=0, most=1)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    """The rows of a run. launch/rules rejects keys that do not fit together."""

    name: str = MISSING
    # reasoning, code, jsonl, hub, mix or samples
    kind: str = checked(words=("reasoning", "code", "jsonl", "hub", "mix", "samples"))
    tasks: list[Task] = field(default_factory=list)
    num_train: Optional[int] = checked(None, least=1)  # reasoning: problems to generate
    num_heldout: int = checked(0, least=0)  # reasoning: problems that are never trained on
    # reasoning: seed of the held-out problems, fixed so that all runs are measured on the same ones
    seed: int = 0
    path: Optional[str] = None  # jsonl: file to train on
    heldout_path: Optional[str] = None
    hub_id: Optional[str] = None
    revision: Optional[str] = None
    split: str = "train"
    heldout_split: Optional[str] = None
    # use only the first rows after filtering, this many; evaluate: of the held-out rows
    limit: Optional[int] = checked(None, least=1)
    sources: list[Source] = field(default_factory=list)  # mix: files and hub datasets
    filter: Filter = field(default_factory=Filter)
    deduplicate: Deduplicate = Deduplicate.none
    # share of rows that are never trained on, chosen by a hash of their question
    heldout_fraction: Optional[float] = checked(None, above=0, below=1)
    balance: Balance = Balance.none
    pairs_per_prompt: int = checked(1, least=1)  # samples: most preference pairs per prompt
    # samples: also pair completions of equal score and unfinished ones; smoke=true sets it
    pairs_of_any: bool = False
    streaming: bool = False  # read rows as they are needed; for data larger than memory
    # streaming: size of the buffer from which the next row is drawn
    shuffle_buffer: int = checked(1000, least=1)
    curriculum: Curriculum = Curriculum.none
    curriculum_args: CurriculumArgs = field(default_factory=CurriculumArgs)
    # adaptive: a result.json with by_level, from an evaluation or from sampling
    pass_rates: Optional[str] = None
    chat_template: Optional[str] = None  # Jinja file that replaces the tokenizer's template
    cache: Optional[str] = None  # directory of prepared rows; empty: the user's cache
    preview: int = checked(0, least=0)  # show this many rows as the model sees them, then exit
