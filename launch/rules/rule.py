"""Define a row of check.py's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.schema import Config

Text = str | Callable[[Config], str]
Fault = Callable[
    [Config], tuple[str, str] | None
]  # the message and the remedy, None if all is well


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[Config], bool]
    message: Text
    remedy: Text

    def sentence(self, config: Config) -> str:
        """Return the message as a sentence."""
        message = filled(self.message, config).rstrip(".")
        return message if message.endswith("?") else f"{message}."

    def refusal(self, config: Config) -> str:
        """Return the message and the remedy."""
        return f"{self.sentence(config)} Use: {filled(self.remedy, config)}."


def rule_of(name: str, fault: Fault) -> Rule:
    """Return a rule whose condition, message and remedy follow from the first fault."""
    return Rule(
        name,
        lambda config: fault(config) is not None,
        lambda config: (fault(config) or ("", ""))[0],
        lambda config: (fault(config) or ("", ""))[1],
    )


def filled(text: Text, config: Config) -> str:
    return text if isinstance(text, str) else text(config)
