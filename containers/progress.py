"""Print the phases of a build with their times and, at intervals, the current activity."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

QUIET_S = 30.0  # longest silence of a log file
WIDTH = 60  # of a result or activity


@dataclass
class Phase:
    log: TextIO | None  # gets every activity
    result: str = ""
    activity: str = "started"

    def say(self, text: str) -> None:
        self.activity = text.strip()
        if self.log:
            print(text, file=self.log, flush=True)


@contextlib.contextmanager
def phase(name: str, log: TextIO | None = None) -> Iterator[Phase]:
    """Print the activity at least every QUIET_S, or each second on a terminal; then the result."""
    current, ended, started_s = Phase(log), threading.Event(), time.monotonic()
    pause_s, end = (1.0, "\r") if sys.stdout.isatty() else (QUIET_S, "\n")

    def show(text: str, end: str = "\n") -> None:
        took_s = time.monotonic() - started_s
        print(f"{name:<7} {text:<{WIDTH}} {took_s:6.1f} s", end=end, flush=True)

    def repeat() -> None:
        while not ended.wait(pause_s):
            show(f"... {current.activity}"[:WIDTH], end)

    repeater = threading.Thread(target=repeat, daemon=True)
    repeater.start()
    try:
        yield current
    finally:
        ended.set()
        repeater.join()
    show(current.result)
