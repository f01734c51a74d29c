"""Show the phases of a build and their seconds; on a terminal also the current activity."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

NAME = 6  # columns: the longest name of a phase, and two spaces
RESULT = 60


@dataclass
class Phase:
    name: str
    console: Console
    status: Status | None  # only on a terminal
    result: str = ""

    def say(self, text: str) -> None:
        """Show what is happening now, in place of the last text."""
        if self.status and text.strip():
            self.status.update(
                f"{self.name:<{NAME}} {text.strip()[: self.console.width - NAME - 6]}"
            )


class Progress:
    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        started_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            status = (
                stack.enter_context(self.console.status(name)) if self.console.is_terminal else None
            )
            if not status:
                self.say(f"{name} ...")
            phase = Phase(name, self.console, status)
            yield phase
        self.say(f"{name:<{NAME}} {phase.result:<{RESULT}} {time.monotonic() - started_s:6.1f} s")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)
