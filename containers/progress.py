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
    log: TextIO | None  # gets every activity
    result: str = ""
    activity: str = "started"

    def say(self, text: str) -> None:
        self.activity = text.strip()
        if self.log:
            print(text, file=self.log, flush=True)
        line = f"{self.name:<7} {self.activity}"
        self.status.update(Text(line, no_wrap=True, overflow="ellipsis"))


@contextlib.contextmanager
def phase(name: str, log: TextIO | None = None) -> Iterator[Phase]:
    """Print the activity at least every QUIET_S, and then the result."""
    console = Console(highlight=False, markup=False)
    started_s, ended = time.monotonic(), threading.Event()

    def show(text: str) -> None:
        took_s = time.monotonic() - started_s
        console.print(f"{name:<7} {text:<{WIDTH}} {took_s:6.1f} s", soft_wrap=True)

    def repeat() -> None:
        while not console.is_terminal and not ended.wait(QUIET_S):
            show(f"... {current.activity}"[:WIDTH])

    with console.status(name) as status:
        current = Phase(name, status, log)
        repeater = threading.Thread(target=repeat, daemon=True)
        repeater.start()
        try:
            yield current
        finally:
            ended.set()
            repeater.join()
    show(current.result)
