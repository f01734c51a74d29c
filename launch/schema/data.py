"""The parts of the schema that say which rows a run trains on, in which order, and by which its model is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import MISSING


class Deduplicate(Enum):
    """Rows that are left out because an equal one came before."""

    none = "none"
    exact = "exact"  # equal in every character that a trainer reads
    normalized = "normalized"  # equal but for case, spaces and Unicode's ways to write a character


class Balance(Enum):
    """What every value of occurs equally often."""

    none = "none"
    task = "task"
    level = "level"


class Curriculum(Enum):
    """How the shares of levels change over a run: of sft and grpo by the step, of sample and raft by the cycle."""

    none = "none"  # as the rows have them
    progressive = "progressive"  # one level after another
    mixed = "mixed"  # the same, with a share of earlier levels
    adaptive = "adaptive"  # most of the level whose answers are right half of the time


class LrScaling(Enum):
    """How the learning rate follows the sequences of a step."""

    none = "none"
    linear = "linear"  # arXiv:1706.02677, for SGD
    sqrt = "sqrt"  # arXiv:2205.10287, for Adam


@dataclass
class Selection:
    """sft, dpo, grpo: which of the saved models the run ends with, by a figure of held-out rows that is measured at every save.
    raft: which of the cycles' models, by the evaluation after each."""

    metric: Optional[str] = None  # one of HELD_OUT_METRICS in launch/trainer_args.py, as eval_loss; empty: the last model is kept
    patience: Optional[int] = None  # end after so many measurements in a row that were no better; empty: never before the last step
    min_delta: float = 0.0  # patience: what is better than the best before by no more than this counts as no better


@dataclass
class CurriculumArgs:
    earlier: float = 0.3  # mixed: share of rows from levels before the current one, all of them alike
    floor: float = 0.05  # adaptive: the least weight of a level, where that of one that is right half of the time is 0.25
    memory: float = 0.9  # adaptive, grpo: how much of the pass rate so far stays when a new batch is scored


@dataclass
class Source:
    """A part of data=mix: a local file, or a data set of the hub. The weights of all parts sum to 1."""

    path: Optional[str] = None
    hub_id: Optional[str] = None
    revision: Optional[str] = None
    split: str = "train"
    weight: float = MISSING


@dataclass
class Filter:
    """What a row must be to be used; a row is left out by the first one that it fails. Lengths are in tokens."""

    tasks: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    equals: dict[str, Any] = field(default_factory=dict)  # field -> value
    regex: dict[str, str] = field(default_factory=dict)  # field -> pattern that is found in it
    min_tokens: Optional[int] = None  # of prompt and completion; grpo: of the prompt
    max_tokens: Optional[int] = None
    max_prompt_tokens: Optional[int] = None
