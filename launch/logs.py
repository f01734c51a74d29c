"""Logs of process groups: followed while they grow, and read back when something went wrong."""

from __future__ import annotations

import itertools
import re
from collections import deque
from pathlib import Path

# torchrun says so when a rank has failed, before it asks the others to stop.
RANK_FAILED = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py.*failed \(exitcode")
LONGEST_LINE = 65536


class Follower:
    """New whole lines of a file since the last look, from where it ended when this was made."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.offset = file.stat().st_size if file.exists() else 0
        self.rest = b""

    def lines(self, all_of_it: bool = False) -> list[str]:
        """`all_of_it` counts a last line without an end too: its process has ended."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self.offset)
            chunk = file.read()
        self.offset += len(chunk)
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        if all_of_it and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        self.rest = self.rest[-LONGEST_LINE:]
        # Of a moving line (a progress bar), what it says last.
        return [line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1] for line in whole]


def last_lines(log: Path, count: int = 15) -> list[str]:
    """What a process said last, before torchrun began to report on it."""
    if not log.exists():
        return []
    with log.open(errors="replace") as file:
        said = itertools.takewhile(lambda line: not RANK_FAILED.search(line), file)
        return [line.rstrip("\n") for line in deque(said, maxlen=count)]
