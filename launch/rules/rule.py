"""Define a row of check.py's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.schema import Config

Text = str | Callable[[Config], str]


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[Config], bool]
    message: Text
    remedy: Text

    def said(self, config: Config) -> str:
        """Return the message as a sentence."""
        message = filled(self.message, config).rstrip(".")
        return message if message.endswith("?") else f"{message}."

    def refusal(self, config: Config) -> str:
        """Return the message and the remedy."""
        return f"{self.said(config)} Use: {filled(self.remedy, config)}."


def filled(text: Text, config: Config) -> str:
    return text if isinstance(text, str) else text(config)
