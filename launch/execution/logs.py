"""Follow the logs of process groups while they grow, and read them back after a failure."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import NamedTuple

from launch.schema.plan import Plan, Process

# Kinds of processes that end after the others.
SERVE = ("server", "verifier")
LONGEST_LINE = 4096  # bytes shown of a line; the file has all of it
MOST_BYTES = 1 << 20  # bytes shown at a time; of a burst, only the end
MOST_DISTINCT = 10_000  # different lines count as progress, not more: a log may be endless
# Colours, cursor movements, and control characters except the tab.
NOT_TEXT = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
# Parts that differ between repeated lines: dates, times of day, durations, iterations per second.
TIMES = re.compile(
    rb"\b\d{2,4}-\d\d(?:-\d\d)?\b|\d+(?::\d\d)+(?:[.,]\d+)?|\d+(?:\.\d+)?(?= "
    rb"?(?:ms|s|sec|seconds?|min|minutes?|it/s)\b)"
)
# After one rank has failed, torchrun stops the others and reports up to 30 s later, when they are
# gone.
REPORT = re.compile(
    r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] (?:Sending process|failed \(exitcode)"
)
FIRST_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
# If one rank was killed and another fails because of that, torchrun may see the second first. A
# rank that torchrun stopped died of that signal. RCCL ends a rank that has lost another by SIGABRT
# (6).
KILLED = re.compile(
    r"\(local_rank: (?P<rank>\d+)\)\s+exitcode\s*: (?P<code>-(?!6 )\d+) \(pid: (?P<pid>\d+)\)"
)
TOLD_TO_END = re.compile(r"Sending process (\d+) closing signal")
STOPPED = re.compile(
    r"torch\.distributed\.elastic\.\S+\.SignalException: Process \d+ got signal: \d+"
)
# vLLM's engine logs why it ended, or which worker it lost; its API server logs only that it ended.
ENGINE_ERROR = re.compile(
    r"EngineCore.*ERROR.*\] (\w*(?:Error|Exception): .+|Worker proc \S+ died unexpectedly "
    r"\(exit code: \S+\))"
)


def of_group(plan: Plan, process: Process) -> Path:
    """Return the log of a process group, without ranks that have their own log."""
    return plan.run_dir / "logs" / f"{process.name}.log"


def of_ranks(plan: Plan, process: Process) -> dict[int, Path]:
    """Return the log of each rank by its number over all nodes; {} for a single rank.

    recipes/__init__.py writes them.
    """
    num_ranks = process.num_ranks
    if process.kind in (*SERVE, "prepare") or num_ranks * plan.config.runtime.slurm.nodes == 1:
        return {}
    ranks = range(process.node * num_ranks, (process.node + 1) * num_ranks)
    return {rank: plan.run_dir / "logs" / f"rank{rank}.log" for rank in ranks}


class Follower:
    """Read new whole lines of a file, starting at its end when this was made (`began`, in bytes).

    `without_report` stops at torchrun's report of a failure, since the launcher's is shorter.
    """

    def __init__(self, file: Path, without_report: bool = False) -> None:
        self.file, self.without_report, self.reports = file, without_report, False
        self.began = self.offset = file.stat().st_size if file.exists() else 0
        self.rest = self.moving = b""
        # Different lines, ignoring times: repetition is not progress.
        self.distinct: set[int] = set()

    def lines(self, all_of_it: bool = False) -> list[str]:
        """Return new lines; `all_of_it` includes an unfinished last line."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            size = file.seek(0, 2)
            self.offset = min(self.offset, size)  # somebody may have truncated the file
            left_out = max(0, size - self.offset - MOST_BYTES)
            file.seek(self.offset + left_out)
            chunk = file.read(MOST_BYTES)
        self.offset += left_out + len(chunk)
        # Count new lines, and each state of a moving line (a progress bar).
        *pieces, self.moving = (self.moving + chunk).replace(b"\r", b"\n").split(b"\n")
        self.moving = self.moving[-LONGEST_LINE:]
        for piece in pieces:
            if len(self.distinct) < MOST_DISTINCT:
                self.distinct.add(hash(TIMES.sub(b"", piece)))
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        if all_of_it and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        self.rest = self.rest[-LONGEST_LINE:]
        lines = [] if self.reports else [text(line) for line in whole]
        if self.without_report:
            for number, line in enumerate(lines):
                if REPORT.search(line) and FIRST_FAILED.search(line):
                    lines, self.reports = lines[:number], True
                    break
        if left_out:
            lines.insert(0, f"({left_out / 1e6:.1f} MB left out; {self.file} has them)")
        return lines


class LastWords(NamedTuple):
    """What a process group logged before torchrun's report, and which rank failed first."""

    lines: list[str]
    rank: int | None = None
    exit_code: int | None = None

    @property
    def why(self) -> str | None:
        """Return how the rank ended, as far as torchrun knows."""
        if self.exit_code is None or self.exit_code >= 0:
            return None if self.exit_code is None else f"exit code {self.exit_code}"
        return killed_by(-self.exit_code)


def last_words(log: Path, since: int = 0, count: int = 200) -> LastWords:
    """Return the last lines of the attempt that began at byte `since` of the log."""
    if not log.exists():
        return LastWords([])
    with log.open("rb") as file:
        file.seek(max(since, file.seek(0, 2) - MOST_BYTES))
        lines = [text(line) for line in file.read().removesuffix(b"\n").split(b"\n")]
    end = next((n for n, line in enumerate(lines) if REPORT.search(line)), len(lines))
    words = [line for line in lines[:end] if line.strip()][-count:]
    report = "\n".join(lines[end:])
    stopped = TOLD_TO_END.findall(report)
    killed = (match for match in KILLED.finditer(report) if match["pid"] not in stopped)
    first = next(killed, None) or FIRST_FAILED.search(report)
    return LastWords(words, int(first["rank"]), int(first["code"])) if first else LastWords(words)


def without_stop(lines: list[str]) -> list[str]:
    """Leave out the traceback that torchrun prints when told to stop; the log has it."""
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
    """Return the error that ended vLLM's engine, if these lines have it."""
    return next((match[1] for line in lines if (match := ENGINE_ERROR.search(line))), None)


def killed_by(number: int) -> str:
    name = next((known.name for known in signal.Signals if known == number), "a real-time signal")
    return f"killed by signal {number} ({name})"


def text(line: bytes) -> str:
    """Return a line as text that a terminal may show; for a moving line, its last state."""
    moved = line.rstrip(b"\r").rpartition(b"\r")[2]
    return NOT_TEXT.sub("", moved[:LONGEST_LINE].decode(errors="replace"))
