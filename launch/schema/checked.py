"""Declare the valid words, range or pattern of a schema field.

launch/rules/values.py checks them. OmegaConf checks the type.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

# Limit of batches, whose divisors are searched up to the square root. This takes 10 ms at most.
MAX_BATCH = 2**31 - 1
HUGE = 1e300  # larger integers may not fit into a float
# Limit of ranks, because a plan has memory and a log for each. A node of MI300X in CPX mode has 64.
MAX_RANKS = 1024


@dataclass(frozen=True)
class Range:
    """A range of numbers: `least` and `most` are included, `above` and `below` are excluded."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = HUGE

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and self.above < number < self.below

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.least:g}"
        lower = f"above {self.above:g}" if self.above > -math.inf else f"at least {self.least:g}"
        if max(self.least, self.above) == -math.inf:
            return f"below {self.below:.10g}" if self.below < HUGE else f"at most {self.most:.10g}"
        if self.below < HUGE:
            return f"{lower} and below {self.below:.10g}"
        return f"{lower} and at most {self.most:.10g}" if self.most < math.inf else lower


@dataclass(frozen=True)
class Text:
    """The strings that match `pattern` completely or, if it is empty, all regular expressions."""

    meaning: str
    example: str
    pattern: str = ""

    def __contains__(self, text: str) -> bool:
        return self.fault(text) is None

    def fault(self, text: str) -> str | None:
        """Return why `text` is invalid; None if it is valid."""
        if self.pattern:
            return None if re.fullmatch(self.pattern, text) else "not allowed"
        try:
            re.compile(text)
        except re.error as error:
            return f"not a regular expression ({error})"
        return None


NAME = Text(
    "at most 100 letters, digits, '.', '_' and '-'",
    "my-run",
    "[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
)
NAME_OR_EMPTY = Text(NAME.meaning, NAME.example, f"({NAME.pattern})?")
REGEX = Text("a regular expression of Python, quoted for the shell", r"'\d+'")


def checked(
    default: Any = MISSING,
    words: tuple[Any, ...] = (),
    text: Text | None = None,
    default_factory: Any = None,
    **bounds: float,
) -> Any:
    """Return a dataclass field that accepts one of `words`, a Text, or a number within `bounds`.

    `bounds` are those of Range. In a mapping, each value is checked. null is valid if the type
    allows it.
    """
    metadata = {"allowed": words or text or Range(**bounds)}
    if default_factory:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
