"""Print the phases of a build with their times and, at intervals, the current activity."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

QUIET_S = 30.0  # longest silence of a log file; a terminal shows every activity
WIDTH = 60  # of a result or activity


@dataclass
class Phase:
    name: str
    status: Status
    log: TextIO | None = None  # gets every activity
    result: str = ""
    activity: str = "started"

    def say(self, text: str) -> None:
        """Show the current activity at once on a terminal, else within QUIET_S."""
        self.activity = text.strip()
        if self.log:
            print(text, file=self.log, flush=True)
        line = f"{self.name:<7} {self.activity}"
        self.status.update(Text(line, no_wrap=True, overflow="ellipsis"))


class Progress:
    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False)

    @contextlib.contextmanager
    def phase(self, name: str, log: TextIO | None = None) -> Iterator[Phase]:
        started_s, ended = time.monotonic(), threading.Event()

        def show(text: str) -> None:
            self.say(f"{name:<7} {text:<{WIDTH}} {time.monotonic() - started_s:6.1f} s")

        def repeat() -> None:
            while not self.console.is_terminal and not ended.wait(QUIET_S):
                show(f"... {phase.activity}"[:WIDTH])

        with self.console.status(name) as status:
            phase = Phase(name, status, log)
            repeater = threading.Thread(target=repeat, daemon=True)
            repeater.start()
            try:
                yield phase
            finally:
                ended.set()
                repeater.join()
        show(phase.result)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)
