"""Declare a field's words, range or pattern together with its type, default and meaning.

launch/rules/values.py checks words and ranges. omegaconf checks the type.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

# Trying all divisors up to the root, 46 thousand, takes a hundredth of a second.
DIVIDED = 2**31 - 1
HUGE = 1e300  # a larger whole number would not become a float
# each rank has memory and a log; a node of MI300X in CPX mode has 64
MOST_RANKS = 1024


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, between `above` and `below`."""

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
    """The texts that match `pattern` as a whole, or every regular expression if it is empty."""

    meaning: str
    example: str
    pattern: str = ""

    def __contains__(self, text: str) -> bool:
        return self.fault(text) is None

    def fault(self, text: str) -> str | None:
        """Return why a text is not allowed; None if it is."""
        if self.pattern:
            return None if re.fullmatch(self.pattern, text) else "not allowed"
        try:
            re.compile(text)
        except re.error as error:
            return f"not a regular expression ({error})"
        return None


NAME = Text(
    "letters, digits, '.', '_' and '-', at most 100 of them",
    "my-run",
    "[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
)
NAME_OR_EMPTY = Text(NAME.meaning, NAME.example, f"({NAME.pattern})?")
REGEX = Text("as of Python's re, quoted for the shell", r"'\d+'")


def checked(
    default: Any = MISSING,
    words: tuple[Any, ...] = (),
    text: Text | None = None,
    default_factory: Any = None,
    **bounds: float,
) -> Any:
    """Return a dataclass field that accepts one of `words`, a Text, or a number in a Range.

    In a mapping each value is checked. null passes if the type allows it.
    """
    metadata = {"allowed": words or text or Range(**bounds)}
    if default_factory:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
