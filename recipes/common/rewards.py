"""Named rewards. Each has TRL's signature: f(prompts, completions, **columns) -> one float a completion, from 0 to 1, or None.

`code_tests` is a name too; it needs the sandbox, and stands in recipes/common/verify_code.py. recipes/common/verify.py puts all of them
together as a composition asks.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from recipes.common.answers import equal
from recipes.common.errors import UserError, near

Reward = Callable[..., list[float] | list[float | None]]
Completion = str | list[dict[str, str]]

# The layout that DeepSeek-R1 was trained towards (arXiv:2501.12948, section 2.2.2).
INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # no second pair hides in the first
FORMAT = re.compile(rf"\s*<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
HALF_LENGTH_CHARACTERS = 200
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # parameters that a column can be given to
ROUNDING = 1e-9  # of a sum of floats that is meant to be 0 or 1


def accuracy(prompts: list[Any], completions: list[Completion], answer: list[str], **columns: Any) -> list[float | None]:
    """1 where the completion's answer equals column `answer` (recipes/common/answers.py), else 0; None where the row has no answer."""
    pairs = zip(completions, answer, strict=True)
    return [None if right is None else float(equal(str(right), final_answer(text(c)))) for c, right in pairs]


def format(prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float]:
    """1 where the completion is <think>...</think><answer>...</answer> and nothing else, else 0."""
    return [float(FORMAT.fullmatch(text(c)) is not None) for c in completions]


def length(prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float]:
    """Prefers short completions: 1 for an empty one, 1/2 at 200 characters, towards 0."""
    return [1.0 / (1.0 + len(text(c)) / HALF_LENGTH_CHARACTERS) for c in completions]


def reasoning_gym(prompts: list[Any], completions: list[Completion], entry: list[str], **columns: Any) -> list[float]:
    """What the task's own scorer gives the completion's answer, from 0 to 1; column `entry` is the task's record."""
    from recipes.common import tasks  # its import takes two seconds, and most rewards do without

    return [tasks.score(final_answer(text(c)), e) for c, e in zip(completions, entry, strict=True)]


def regex(prompts: list[Any], completions: list[Completion], pattern: list[str], **columns: Any) -> list[float]:
    """1 where the completion's answer, as a whole, matches column `pattern`, a regular expression of Python; else 0."""
    return [float(re.fullmatch(p, final_answer(text(c)), re.DOTALL) is not None) for c, p in zip(completions, pattern, strict=True)]


REWARDS: dict[str, Reward] = {f.__name__: f for f in (accuracy, format, length, reasoning_gym, regex)}
CODE_TESTS = "code_tests"
NAMES = sorted([*REWARDS, CODE_TESTS])
SLOW_IMPORTS = {"accuracy": "math_verify", "reasoning_gym": "recipes.common.tasks"}  # of their functions
NEEDED_COLUMN = {"accuracy": "answer", "reasoning_gym": "entry", "regex": "pattern", CODE_TESTS: "tests"}


def text(completion: Completion) -> str:
    """What was generated, of a plain or a conversational completion."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(generated: str) -> str:
    """The last <answer>...</answer> of a text; without one, what follows its thinking, or all of it."""
    found = ANSWER.findall(generated)
    return (found[-1] if found else generated.rpartition("</think>")[2]).strip()


def check_name(name: str, columns: list[str], rows: str = "the rows") -> None:
    """Raises UserError for a named reward that is none, and for one whose column `rows`, which have `columns`, lack."""
    if name not in NAMES:
        raise UserError(
            f"method.rewards has {name!r}, which is no reward. {near(name, NAMES)} Your own is given as package.module.function."
        )
    if name in NEEDED_COLUMN and NEEDED_COLUMN[name] not in columns:
        raise UserError(f"method.rewards.{name} reads column {NEEDED_COLUMN[name]!r}, and {rows} have {', '.join(columns)}.")


def judge(name: str, prompts: list[Any], completions: list[Completion], columns: dict[str, Any]) -> list[float | None]:
    """What a reward of REWARDS, or a function of the user's by its dotted path, gives each completion; None where it does not apply.

    Raises UserError for a function that cannot be called with these columns and for another number of scores than completions, ValueError
    for a score that is no number from 0 to 1, and whatever it raises.
    """
    function = imported(name) if "." in name else REWARDS[name]
    if "." in name:
        _check_signature(name, function, columns)
    scores = function(prompts=prompts, completions=completions, **columns)
    if len(scores) != len(completions):
        raise UserError(f"method.rewards.{name} returned {len(scores)} scores for {len(completions)} completions: one each.")
    found = [None if score is None else float(score) for score in scores]
    if not all(score is None or math.isfinite(score) for score in found):
        raise ValueError(f"a score that is no number: {found}")
    # Thresholds and figures take 1 for right and 0 for wrong: what lies beyond would be kept by the one and not counted by the other.
    beyond = [score for score in found if score is not None and not -ROUNDING <= score <= 1 + ROUNDING]
    if beyond:
        raise ValueError(
            f"a score outside 0 to 1: {beyond[0]:g}; what is to count for more, or against, has another weight in method.rewards"
        )
    return [None if score is None else min(max(score, 0.0), 1.0) for score in found]


def _check_signature(path: str, function: Reward, columns: dict[str, Any]) -> None:
    """Raises UserError where a function of the user's cannot be called as a reward is: no completion is to blame for that."""
    given = {"prompts": None, "completions": None, **columns}
    try:
        signature = inspect.signature(function)
        signature.bind(**given)
    except ValueError:  # of one in C nothing is known
        return
    except TypeError as error:
        missing = [
            name for name, one in signature.parameters.items() if name not in given and one.default is one.empty and one.kind in NAMED
        ]
        rows = [name for name, values in columns.items() if isinstance(values, list)]
        hint = near(missing[0], rows) if missing else ""
        raise UserError(
            f"method.rewards.{path}{_defined_at(function)}: {error}. A reward is called as f(prompts, completions, **columns), and its "
            f"columns here are {', '.join(rows) or '(none)'}.{f' {hint}' if hint.startswith('Did') else ''}"
        ) from error


def _defined_at(function: Reward) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def failure(name: str, error: Exception) -> str:
    """What a reward has raised; of a function of the user's with the line of its module."""
    said = f"{type(error).__name__}: {error}"
    if "." not in name:
        return said
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, KeyError) and frames and frames[-1].filename in ("<frozen os>", os.__file__):
        said += " of os.environ"
    file = getattr(sys.modules.get(name.rpartition(".")[0]), "__file__", None)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == file), None)
    return said if line is None else f"{said} ({file}:{line})"


def imported(path: str) -> Reward:
    """A function of the user's, by its dotted path. Raises UserError."""
    module_name, _, function_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"method.rewards has {path!r}: {error}. Its module must be on PYTHONPATH where the run starts.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"method.rewards has {path!r}: {module_name} has no function {function_name!r}. {near(function_name, known)}")
    return function
