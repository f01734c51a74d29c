"""One row of check.py's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.schema import Config


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[Config], bool]
    message: Callable[[Config], str]
    remedy: Callable[[Config], str]

    def said(self, config: Config) -> str:
        """The message with its end: a near name asks."""
        message = self.message(config).rstrip(".")
        return message if message.endswith("?") else f"{message}."

    def refusal(self, config: Config) -> str:
        """The message and the remedy."""
        return f"{self.said(config)} Use: {self.remedy(config)}."
