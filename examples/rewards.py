r"""Rewards of your own: copy this file, and name its functions in method.rewards.

    python launch/run.py method=grpo data=jsonl data.path=examples/math.jsonl \
        'method.rewards={accuracy: 1.0, examples.rewards.brevity: 0.2}'

A function gets the completions of a batch and the columns of their rows as lists. It returns one
score from 0 to 1 for each completion, or None where it does not apply.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion: a string, or a list of messages for chat rows."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def brevity(completions: list[Any], **columns: Any) -> list[float]:
    """Score 1 up to 200 characters, and less for longer texts."""
    return [min(1.0, 200 / max(len(text(completion)), 1)) for completion in completions]


def number(text: str) -> Decimal | None:
    """Return the last number of a text, such as 1234 for "1,234.00"; None if it has none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def last_number(completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
    """Score 1 if the last number of the completion equals that of the row's `answer`."""
    pairs = zip(completions, map(number, map(str, answer)), strict=True)
    return [
        None if right is None else float(number(text(completion)) == right)
        for completion, right in pairs
    ]
