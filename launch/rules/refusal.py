"""Define what a rule yields for a composition that it rejects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.schema.checked import Range


@dataclass(frozen=True)
class Refusal:
    name: str  # of the rule
    message: str
    remedy: str

    @property
    def sentence(self) -> str:
        """Return the message as a sentence."""
        message = self.message.rstrip(".")
        return message if message.endswith("?") else f"{message}."

    def __str__(self) -> str:
        return f"{self.sentence} Use: {self.remedy}."


def outside(
    name: str, key: str, number: float | None, allowed: Range, why: str, other: str = ""
) -> Iterator[Refusal]:
    """Yield a refusal if a number is outside the range that follows from other settings.

    `other` is a remedy besides a number in the range.
    """
    if number is not None and number not in allowed:
        remedy = f"{key}=N, {allowed}" + (other and f"; or {other}")
        yield Refusal(name, f"{key}={number}: {why}", remedy)
