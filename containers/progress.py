"""Print the phases of a build with their times, and show the current activity on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status
from rich.text import Text


@dataclass
class Phase:
    name: str
    status: Status
    result: str = ""

    def say(self, text: str) -> None:
        """Show the current activity, if the output is a terminal."""
        line = f"{self.name:<6} {text.strip()}"
        self.status.update(Text(line, no_wrap=True, overflow="ellipsis"))


class Progress:
    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        started_s = time.monotonic()
        with self.console.status(name) as status:
            phase = Phase(name, status)
            yield phase
        self.say(f"{name:<6} {phase.result:<60} {time.monotonic() - started_s:6.1f} s")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)
