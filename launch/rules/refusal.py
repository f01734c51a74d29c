"""Define what a rule yields for a composition that it rejects."""

from __future__ import annotations

from dataclasses import dataclass


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
