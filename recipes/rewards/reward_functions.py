"""Define named rewards: f(prompts, completions, **columns) -> scores from 0 to 1, or None.

`code_tests` needs the sandbox and is in verify_code.py. verifier.py combines rewards.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from launch.core.errors import UserError
from recipes.rewards.answers import equal

Reward = Callable[..., list[float] | list[float | None]]
Completion = str | list[dict[str, str]]


class Judgment(NamedTuple):
    """Hold a reward's score of a completion (None if it does not apply) and the error, if any."""

    score: float | None
    error: str | None = None


# DeepSeek-R1's layout (arXiv:2501.12948, section 2.2.2).
INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # text without another such tag
FORMAT = re.compile(rf"\s*<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
HALF_LENGTH_CHARACTERS = 200
ROUNDING = 1e-9  # tolerance for sums of floats


def accuracy(
    prompts: list[Any], completions: list[Completion], answer: list[str], **columns: Any
) -> list[float | None]:
    """Return 1 if the answer equals column `answer`, else 0; None if the column is null."""
    pairs = zip(completions, answer, strict=True)
    return [
        None if right is None else float(equal(str(right), final_answer(text(c))))
        for c, right in pairs
    ]


def format(prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float]:
    """Return 1 for exactly <think>...</think><answer>...</answer>, else 0."""
    return [float(FORMAT.fullmatch(text(c)) is not None) for c in completions]


def length(prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float]:
    """Return 1 for an empty completion and 1/2 at 200 characters; it decreases towards 0."""
    return [1.0 / (1.0 + len(text(c)) / HALF_LENGTH_CHARACTERS) for c in completions]


def reasoning_gym(
    prompts: list[Any], completions: list[Completion], entry: list[str], **columns: Any
) -> list[float]:
    """Return the task's score from 0 to 1. Column `entry` is the task's record."""
    from recipes.data import tasks  # takes two seconds to import

    return [tasks.score(final_answer(text(c)), e) for c, e in zip(completions, entry, strict=True)]


def regex(
    prompts: list[Any], completions: list[Completion], pattern: list[str], **columns: Any
) -> list[float]:
    """Return 1 if the entire answer matches column `pattern`, a regular expression, else 0."""
    return [
        float(re.fullmatch(p, final_answer(text(c)), re.DOTALL) is not None)
        for c, p in zip(completions, pattern, strict=True)
    ]


REWARDS: dict[str, Reward] = {
    f.__name__: f for f in (accuracy, format, length, reasoning_gym, regex)
}
CODE_TESTS = "code_tests"
NAMES = sorted([*REWARDS, CODE_TESTS])
SLOW_IMPORTS = {"accuracy": "math_verify", "reasoning_gym": "recipes.data.tasks"}
NEEDED_COLUMN = {
    "accuracy": "answer",
    "reasoning_gym": "entry",
    "regex": "pattern",
    CODE_TESTS: "tests",
}


def text(completion: Completion) -> str:
    """Return the generated text of a plain or conversational completion."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(generated: str) -> str:
    """Return the last <answer>...</answer>, or else the text after </think>, or else all of it."""
    answers = ANSWER.findall(generated)
    return (answers[-1] if answers else generated.rpartition("</think>")[2]).strip()


def judge(
    name: str, prompts: list[Any], completions: list[Completion], columns: dict[str, Any]
) -> list[float | None]:
    """Return the scores by a named reward or a user's function. None means that it does not apply.

    Raises UserError for a wrong number of scores, ValueError for a score outside 0 to 1, and any
    exception of the function.
    """
    function = import_reward(name) if "." in name else REWARDS[name]
    returned = function(prompts=prompts, completions=completions, **columns)
    if len(returned) != len(completions):
        raise UserError(
            f"method.rewards.{name} returned {len(returned)} scores for {len(completions)} "
            "completions. Return one score per completion."
        )
    scores = [None if score is None else float(score) for score in returned]
    for score in scores:
        # Thresholds and metrics assume scores from 0 to 1. This rejects NaN too.
        if score is not None and not -ROUNDING <= score <= 1 + ROUNDING:
            raise ValueError(
                f"score {score:g} is outside 0 to 1. Return a score in this range, such as "
                "(score + 1) / 2 for -1 to 1. To strengthen or negate a reward, change its weight "
                "in method.rewards"
            )
    return [None if score is None else min(max(score, 0.0), 1.0) for score in scores]


def attempt(
    name: str, prompts: list[Any], completions: list[Completion], columns: dict[str, Any]
) -> tuple[list[float | None] | None, str | None]:
    """Return (scores, None), or (None, reason) if the reward fails for these completions.

    The reason includes the line of a user's function. Raises UserError if the function itself is
    invalid.
    """
    try:
        return judge(name, prompts, completions, columns), None
    except UserError:
        raise
    except MemoryError:
        return None, "the reward exceeds its memory limit"
    except Exception as error:  # any exception of a user's function
        reason = f"{type(error).__name__}: {error}"
        file = getattr(sys.modules.get(name.rpartition(".")[0]), "__file__", None)
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = next((frame.lineno for frame in frames if frame.filename == file), None)
        return None, reason if line is None else f"{reason} ({file}:{line})"


def import_reward(path: str) -> Reward:
    """Return a user's function by its dotted path. Raises UserError if the import fails."""
    module_name, _, function_name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"method.rewards.{path}: {error}. Use a function of a module in the directory where "
            "the run starts, or user_env.PYTHONPATH=<its directory>."
        ) from error
