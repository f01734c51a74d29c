"""Declare the valid words, range or pattern of a schema field.

launch/rules/values.py checks them. OmegaConf checks the type.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

# Limit of batches, whose divisors are searched up to the square root. This takes 10 ms at most.
MAX_BATCH = 2**31 - 1
# Limit of sizes and numbers of steps. Beyond 64 bits, sums of floats would lose whole gigabytes.
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 365 * 86400  # longer waits overflow in the operating system
HUGE = 1e300  # larger integers may not fit into a float
# Limit of ranks, because a plan has memory and a log for each. A node of MI300X in CPX mode has 64.
MAX_RANKS = 1024


@dataclass(frozen=True)
class Range:
    """A range that includes `minimum` and `maximum`, and excludes `above` and `below`."""

    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf
    below: float = HUGE

    def __contains__(self, number: float) -> bool:
        return self.minimum <= number <= self.maximum and self.above < number < self.below

    def __str__(self) -> str:
        if self.minimum == self.maximum:
            return f"{self.minimum:g}"
        lower = f"above {self.above:g}" if self.above > -math.inf else f"at least {self.minimum:g}"
        upper = f"below {self.below:.10g}" if self.below < HUGE else f"at most {self.maximum:.10g}"
        if max(self.minimum, self.above) == -math.inf:
            return upper
        return lower if upper == "at most inf" else f"{lower} and {upper}"


@dataclass(frozen=True)
class Text:
    """The strings that match `pattern` completely or, if it is empty, all regular expressions."""

    meaning: str
    example: str
    pattern: str = ""

    def __contains__(self, text: str) -> bool:
        return self.problem(text) is None

    def problem(self, text: str) -> str | None:
        """Return why `text` is invalid; None if it is valid."""
        if self.pattern:
            return None if re.fullmatch(self.pattern, text) else "invalid format"
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
COUNTER = Text("a counter of `rocprofv3-avail list`", "[SQ_WAVES]", r"[A-Za-z]\w*(\[\d+\])?")
REGEX = Text("a Python regular expression, quoted for the shell", r"'\d+'")


def checked(
    default: Any = MISSING,
    words: tuple[Any, ...] = (),
    text: Text | None = None,
    default_factory: Any = None,
    **bounds: float,
) -> Any:
    """Return a dataclass field that accepts one of `words`, a Text, or a number within `bounds`.

    `bounds` are fields of Range. In a mapping, each value is checked. null is valid if the type
    allows it.
    """
    metadata = {"allowed": words or text or Range(**bounds)}
    if default_factory:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
