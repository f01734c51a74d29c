"""Define the schema of a run's rows (their source, filters and order) and of model selection."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import MISSING

from launch.schema.checked import MAX_COUNT, REGEX, checked


class Deduplicate(Enum):
    """Which rows are dropped as duplicates of an earlier row."""

    none = "none"
    exact = "exact"  # equal in every character that a trainer reads
    normalized = "normalized"  # equal except for case, spaces and Unicode normalization


class Balance(Enum):
    """The field whose values get equal numbers of rows."""

    none = "none"
    task = "task"
    level = "level"


class Curriculum(Enum):
    """How the shares of levels change: per step in sft and grpo, per cycle in sample and raft."""

    none = "none"  # rows in the order of the data set
    progressive = "progressive"  # one level after another
    mixed = "mixed"  # like progressive, but with a share of earlier levels
    adaptive = "adaptive"  # mostly the levels whose answers are correct half of the time


class LrScaling(Enum):
    """How the learning rate scales with the number of sequences per step."""

    none = "none"
    linear = "linear"  # arXiv:1706.02677, for SGD
    sqrt = "sqrt"  # arXiv:2205.10287, for Adam


@dataclass
class Selection:
    """Selection of the model with the best metric on held-out rows.

    sft, dpo and grpo evaluate every saved model. raft evaluates the model after each cycle.
    """

    # one of method.held_out_metrics, such as eval_loss; null: use the last model
    metric: Optional[str] = None
    # stop after this many evaluations in a row without improvement; null: run all steps
    patience: Optional[int] = checked(None, minimum=1)
    # for `patience`: an improvement must be larger than this
    min_delta: float = checked(0.0, minimum=0)


@dataclass
class CurriculumArgs:
    # mixed: share of rows from earlier levels, divided equally among them
    earlier: float = checked(0.3, minimum=0, below=1)
    # adaptive: smallest weight of a level; at a pass rate of one half, the weight is 0.25
    floor: float = checked(0.05, above=0, below=1)
    # adaptive, grpo: weight of the old pass rate in its moving average
    memory: float = checked(0.9, minimum=0, below=1)


@dataclass
class Source:
    """A source of data=mix: a local file or a Hub dataset. The weights of all sources sum to 1."""

    path: Optional[str] = None
    hub_id: Optional[str] = None
    revision: Optional[str] = None  # commit; null: the cache's or the newest, recorded
    subset: Optional[str] = None
    split: str = "train"
    # like the keys of `data`, which apply to the source unless it sets its own
    columns: dict[str, Optional[str]] = field(default_factory=dict)
    answer_pattern: Optional[str] = checked(None, text=REGEX)
    weight: float = checked(above=0)


@dataclass
class Filter:
    """Conditions that a row must meet, otherwise it is dropped. Lengths are in tokens."""

    tasks: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    equals: dict[str, Any] = field(default_factory=dict)  # field -> value
    # field -> pattern that must occur in its text
    regex: dict[str, str] = checked(default_factory=dict, text=REGEX)
    # length of prompt and completion; grpo: of the prompt
    min_tokens: Optional[int] = checked(None, minimum=0)
    max_tokens: Optional[int] = checked(None, minimum=1)
    max_prompt_tokens: Optional[int] = checked(None, minimum=1)


@dataclass
class Task:
    """A task of reasoning-gym or code_tasks.py.

    `level` sets the level of every attribute in the task's curriculum. `config` overrides fields.
    """

    name: str = MISSING
    level: int = 0
    weight: float = checked(1.0, above=0)
    # data=cups: share of training rows with intermediate steps in <think> before the answer
    worked: float = checked(0.0, minimum=0, maximum=1)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    """The rows of a run. launch/rules rejects contradictory keys."""

    name: str = MISSING
    # reasoning, code, jsonl, hub, mix or samples
    kind: str = checked(words=("reasoning", "code", "jsonl", "hub", "mix", "samples"))
    tasks: list[Task] = field(default_factory=list)
    # reasoning: problems to generate
    num_train: Optional[int] = checked(None, minimum=1, maximum=MAX_COUNT)
    # reasoning: problems that are never trained on
    num_heldout: int = checked(0, minimum=0, maximum=MAX_COUNT)
    # reasoning: seed of the problems; runs with other seeds have the same held-out rows
    seed: int = 0
    path: Optional[str] = None  # jsonl: file to train on
    heldout_path: Optional[str] = None
    hub_id: Optional[str] = None
    revision: Optional[str] = None  # hub: commit; null: the cache's or the newest, recorded
    subset: Optional[str] = None  # hub: name of a configuration, such as `main` of openai/gsm8k
    split: str = "train"
    heldout_split: Optional[str] = None
    # field that the method reads -> field of the rows (`a.b` in an object); null: omit the field
    columns: dict[str, Optional[str]] = field(default_factory=dict)
    # an answer is the last match of this pattern in the field `answer`: its first group, or all
    answer_pattern: Optional[str] = checked(None, text=REGEX)
    # first message of conversations that have none; text prompts become conversations; '' for none
    system_prompt: Optional[str] = None
    # number of rows to use, the first ones after filtering; evaluate: of the held-out rows
    limit: Optional[int] = checked(None, minimum=1)
    sources: list[Source] = field(default_factory=list)  # mix: files and Hub datasets
    filter: Filter = field(default_factory=Filter)
    deduplicate: Deduplicate = Deduplicate.none
    # share of rows to hold out, chosen by a hash of their question
    heldout_fraction: Optional[float] = checked(None, above=0, below=1)
    balance: Balance = Balance.none
    pairs_per_prompt: int = checked(1, minimum=1)  # samples: maximum of preference pairs per prompt
    # samples: also pair completions with equal scores and unfinished ones; smoke=true sets this
    pairs_of_any: bool = False
    streaming: bool = False  # read rows only as they are needed, for data larger than memory
    # streaming: size of the buffer that the next row is drawn from
    shuffle_buffer: int = checked(1000, minimum=1)
    curriculum: Curriculum = Curriculum.none
    curriculum_args: CurriculumArgs = field(default_factory=CurriculumArgs)
    # adaptive: result.json of an evaluation or a sampling, with by_level
    pass_rates: Optional[str] = None
    chat_template: Optional[str] = None  # Jinja file that replaces the tokenizer's template
    cache: Optional[str] = None  # directory of prepared rows; null: the user's cache
    preview: int = checked(0, minimum=0)  # show this many rows as the model reads them, then exit

    @property
    def has_heldout(self) -> bool:
        """Return whether load_heldout in recipes/data/data_load.py would find rows."""
        sources = {
            **dict.fromkeys(("reasoning", "code"), self.num_heldout),
            "jsonl": self.heldout_path,
            "hub": self.heldout_split,
        }
        return bool(sources.get(self.kind) or self.heldout_fraction)
