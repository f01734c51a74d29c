"""Rewards of GRPO by name. Each takes the completions and the columns of their rows, and gives one number a completion."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import math_verify

from recipes.common import tasks
from recipes.common.errors import UserError, near

Reward = Callable[..., list[float]]
LONGEST = 1000  # characters at which the length reward reaches 0


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion: a string, or the message of a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str:
    """What stands in <answer> tags, or after the thinking, or all of it."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return (tagged[-1] if tagged else text.rsplit("</think>", 1)[-1]).strip()


def accuracy(completions: list, answer: list[str], **_: Any) -> list[float]:
    """1 where math-verify finds the final answer equal to the column `answer`, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(is_equal(final_answer(text_of(completion)), right)) for completion, right in pairs]


def is_equal(given: str, right: str) -> bool:
    """Equal as text, or as mathematics. Timeouts of math-verify use SIGALRM, which only the main thread has: they are off."""
    if given == right:
        return True
    parsed = [math_verify.parse(text, parsing_timeout=None) for text in (right, given)]
    return bool(all(parsed) and math_verify.verify(*parsed, timeout_seconds=None))


def format(completions: list, **_: Any) -> list[float]:
    """1 for <think>...</think> followed by <answer>...</answer> and nothing else, else 0."""
    shape = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", flags=re.DOTALL)
    return [float(shape.fullmatch(text_of(completion)) is not None) for completion in completions]


def length(completions: list, **_: Any) -> list[float]:
    """From 1 for an empty completion down to 0 at 1000 characters: brevity, to be weighted against being right."""
    return [max(0.0, 1.0 - len(text_of(completion)) / LONGEST) for completion in completions]


def reasoning_gym(completions: list, entry: list[str], **_: Any) -> list[float]:
    """What the task's own scorer gives the final answer, from 0 to 1. Needs data=reasoning."""
    return [tasks.score(final_answer(text_of(completion)), record) for completion, record in zip(completions, entry, strict=True)]


REWARDS: dict[str, Reward] = {"accuracy": accuracy, "format": format, "length": length, "reasoning_gym": reasoning_gym}
NEEDS = {"accuracy": "answer", "reasoning_gym": "entry"}  # the column of the data that a reward reads


def find(name: str, columns: list[str]) -> Reward:
    """The reward called `name`, or the function at a dotted path. Raises UserError."""
    if name in REWARDS:
        if name in NEEDS and NEEDS[name] not in columns:
            raise UserError(f"method.rewards.{name} reads the column {NEEDS[name]!r}, and the data has {', '.join(columns)}.")
        return REWARDS[name]
    module, _, function = name.rpartition(".")
    if not module:
        raise UserError(f"method.rewards.{name}: no such reward. {near(name, REWARDS)}")
    try:
        found: Reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"method.rewards.{name} cannot be imported: {error}.") from error
    return found
