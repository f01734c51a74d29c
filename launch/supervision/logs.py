"""Logs of process groups: followed while they grow, and read back when something went wrong."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import NamedTuple

LONGEST_LINE = 4096  # bytes of a line that are shown; the file has all of it
MOST_BYTES = 1 << 20  # that one look shows; of a burst, its end
MOST_SAID = 10_000  # different lines that count as progress: a log that goes on for ever must not
# Colours and cursor movements, and control characters but for the tab.
NOT_TEXT = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0a-\x1f\x7f-\x9f]")
# What differs each time the same is said: dates, times of day, durations, iterations a second.
TIMES = re.compile(rb"\b\d{2,4}-\d\d(?:-\d\d)?\b|\d+(?::\d\d)+(?:[.,]\d+)?|\d+(?:\.\d+)?(?= ?(?:ms|s|sec|seconds?|min|minutes?|it/s)\b)")
# torchrun begins to end the other ranks when one has failed, and reports at most 30 s later, when they are gone.
REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] (?:Sending process|failed \(exitcode)")
FIRST_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
# Of a rank that was killed and one that fails because of that, torchrun may see the second first. Those it told to end died of that,
# and SIGABRT (6) is how RCCL ends a rank that has lost another.
KILLED = re.compile(r"\(local_rank: (?P<rank>\d+)\)\s+exitcode\s*: (?P<code>-(?!6 )\d+) \(pid: (?P<pid>\d+)\)")
TOLD_TO_END = re.compile(r"Sending process (\d+) closing signal")
STOPPED = re.compile(r"torch\.distributed\.elastic\.\S+\.SignalException: Process \d+ got signal: \d+")
# vLLM's engine says why it ends, or which worker of its own it has lost; its API server, which ends after it, says only that it did.
ENGINE_ERROR = re.compile(r"EngineCore.*ERROR.*\] (\w*(?:Error|Exception): .+|Worker proc \S+ died unexpectedly \(exit code: \S+\))")


class Follower:
    """New whole lines of a file since the last look, from where it ended when this was made (`began`, in bytes).

    `without_report`: nothing from torchrun's own account of a failure on, a traceback and a table: the launcher's is shorter.
    """

    def __init__(self, file: Path, without_report: bool = False) -> None:
        self.file, self.without_report, self.reports = file, without_report, False
        self.began = self.offset = file.stat().st_size if file.exists() else 0
        self.rest = self.moving = b""
        self.said: set[int] = set()

    @property
    def num_said(self) -> int:
        """Different lines so far, times left out: what is said again and again is no progress."""
        return len(self.said)

    def lines(self, all_of_it: bool = False) -> list[str]:
        """`all_of_it` counts a last line without an end too: its process has ended."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            size = file.seek(0, 2)
            self.offset = min(self.offset, size)  # somebody emptied it
            left_out = max(0, size - self.offset - MOST_BYTES)
            file.seek(self.offset + left_out)
            chunk = file.read(MOST_BYTES)
        self.offset += left_out + len(chunk)
        self._note(chunk)
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        if all_of_it and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        self.rest = self.rest[-LONGEST_LINE:]
        said = self._shown([text(line) for line in whole])
        return [f"({left_out / 1e6:.1f} MB left out; {self.file} has them)", *said] if left_out else said

    def _shown(self, said: list[str]) -> list[str]:
        if self.reports:
            return []
        is_report = (self.without_report and REPORT.search(line) and FIRST_FAILED.search(line) for line in said)
        begin = next((n for n, found in enumerate(is_report) if found), len(said))
        self.reports = begin < len(said)
        return said[:begin]

    def _note(self, chunk: bytes) -> None:
        """Count what has not been said before, each state of a moving line (a progress bar) by itself."""
        *pieces, self.moving = (self.moving + chunk).replace(b"\r", b"\n").split(b"\n")
        self.moving = self.moving[-LONGEST_LINE:]
        for piece in pieces:
            if len(self.said) < MOST_SAID:
                self.said.add(hash(TIMES.sub(b"", piece)))


class LastWords(NamedTuple):
    """What a process group said before torchrun began to report, and which rank failed first by its report, with its exit code."""

    lines: list[str]
    rank: int | None = None
    exit_code: int | None = None


def last_words(log: Path, since: int = 0, count: int = 200) -> LastWords:
    """Of the attempt that began at byte `since` of the log."""
    if not log.exists():
        return LastWords([])
    with log.open("rb") as file:
        file.seek(max(since, file.seek(0, 2) - MOST_BYTES))
        lines = [text(line) for line in file.read().removesuffix(b"\n").split(b"\n")]
    end = next((n for n, line in enumerate(lines) if REPORT.search(line)), len(lines))
    said = [line for line in lines[:end] if line.strip()][-count:]
    report = "\n".join(lines[end:])
    told = TOLD_TO_END.findall(report)
    found = next((match for match in KILLED.finditer(report) if match["pid"] not in told), None) or FIRST_FAILED.search(report)
    return LastWords(said, int(found["rank"]), int(found["code"])) if found else LastWords(said)


def without_stop(lines: list[str]) -> list[str]:
    """Without the traceback by which torchrun ends when it is told to stop: nobody needs to read it, and the log has it."""
    end = next((n for n, line in enumerate(lines) if STOPPED.fullmatch(line)), None)
    if end is None:
        return lines
    begin = end
    while begin and lines[begin - 1].startswith(" "):
        begin -= 1
    if begin and lines[begin - 1].startswith("Traceback "):
        begin -= 1
    return [*lines[:begin], *lines[end + 1 :]]


def root_cause(lines: list[str]) -> str | None:
    """The error that ended vLLM's engine, where these lines hold it."""
    return next((match[1] for line in lines if (match := ENGINE_ERROR.search(line))), None)


def killed_by(number: int) -> str:
    """As a person looks it up."""
    name = next((known.name for known in signal.Signals if known == number), "a real-time signal")
    return f"killed by signal {number} ({name})"


def text(line: bytes) -> str:
    """What a terminal may show of a line: of a moving one what it says last, nothing that moves the cursor."""
    moved = line.rstrip(b"\r").rpartition(b"\r")[2]
    return NOT_TEXT.sub("", moved[:LONGEST_LINE].decode(errors="replace"))
