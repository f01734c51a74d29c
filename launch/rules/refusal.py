"""Define the refusal that a rule yields for a composition that cannot work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    name: str  # of the rule
    message: str
    remedy: str

    @property
    def sentence(self) -> str:
        """Return the message with its final punctuation."""
        message = self.message.rstrip(".")
        return message if message.endswith("?") else f"{message}."

    def __str__(self) -> str:
        return f"{self.sentence} Use: {self.remedy}."
