"""Follow the logs of process groups while they grow, and read them back after a failure."""

import re
import signal
from pathlib import Path
from typing import NamedTuple

from launch.schema.plan import Plan, Process

# Kinds of processes that serve the trainers and therefore exit after them.
SERVER_KINDS = ("server", "verifier", "pause")
MAX_LINE = 4096  # bytes shown of a line; the file has the rest
MAX_BYTES = 1 << 20  # bytes shown per call, from the end of the new output
MAX_DISTINCT = 10_000  # different lines that are remembered, to bound the memory
# Colors, cursor movements, and control characters other than the tab.
NOT_TEXT = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
# Parts that differ between repeated lines: dates, times of day, durations, iterations per second.
TIMES = re.compile(
    rb"\b\d{2,4}-\d\d(?:-\d\d)?\b|\d+(?::\d\d)+(?:[.,]\d+)?|\d+(?:\.\d+)?(?= "
    rb"?(?:ms|s|sec|seconds?|min|minutes?|it/s)\b)"
)
# When a rank fails, torchrun stops the others first. Its report follows up to 30 s later.
REPORT = re.compile(
    r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] (?:Sending process|failed \(exitcode)"
)
FIRST_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
# A killed rank can make another rank fail, which torchrun may report first, so look for a rank that
# was killed by a signal that torchrun did not send. Ignore SIGABRT (6), which RCCL raises after it
# has lost a rank.
KILLED = re.compile(
    r"\(local_rank: (?P<rank>\d+)\)\s+exitcode\s*: (?P<code>-(?!6 )\d+) \(pid: (?P<pid>\d+)\)"
)
SIGNALLED = re.compile(r"Sending process (\d+) closing signal")
STOPPED = re.compile(
    r"torch\.distributed\.elastic\.\S+\.SignalException: Process \d+ got signal: \d+"
)
# vLLM's worker or engine logs its error, and the engine the worker that it lost. The engine's error
# after a worker's is only that it failed, and the API server's only that it exits.
ENGINE_ERROR = re.compile(
    r"(?:EngineCore|Worker).*ERROR.*\] (?!Exception: WorkerProc initialization failed)"
    r"([\w.]*(?:Error|Exception): .+|Worker proc \S+ died unexpectedly \(exit code: \S+\))"
)


def group_log(plan: Plan, process: Process) -> Path:
    """Return the log of a process group. Ranks with a separate log are not in it."""
    return plan.run_dir / "logs" / f"{process.name}.log"


def rank_logs(plan: Plan, process: Process) -> dict[int, Path]:
    """Return each rank's log by its global rank; {} if the run has a single rank.

    recipes/__init__.py writes these logs.
    """
    num_ranks, num_nodes = process.num_ranks, plan.config.runtime.slurm.nodes
    if process.kind in (*SERVER_KINDS, "prepare") or num_ranks * num_nodes == 1:
        return {}
    ranks = range(process.node * num_ranks, (process.node + 1) * num_ranks)
    return {rank: plan.run_dir / "logs" / f"rank{rank}.log" for rank in ranks}


class Follower:
    """Read lines that are added to a file. `start_offset` is its size at the start, in bytes.

    `without_report` stops at torchrun's report of a failure, because the launcher prints its own.
    """

    def __init__(self, file: Path, without_report: bool = False) -> None:
        self.file, self.without_report, self.reports = file, without_report, False
        self.start_offset = self.offset = file.stat().st_size if file.exists() else 0
        self.rest = self.bar_rest = b""
        # Hashes of different lines without their times, because repetition is not progress.
        self.distinct: set[int] = set()

    def lines(self, with_partial: bool = False) -> list[str]:
        """Return new lines; `with_partial` includes an incomplete last line."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            size = file.seek(0, 2)
            if size < self.offset:  # it was truncated, as a resumed run does with its metrics
                self.offset, self.rest, self.bar_rest = 0, b"", b""
            num_skipped = max(0, size - self.offset - MAX_BYTES)
            file.seek(self.offset + num_skipped)
            chunk = file.read(MAX_BYTES)
        self.offset += num_skipped + len(chunk)
        # Each state of a progress bar ends with \r and is a separate line in `distinct`.
        *pieces, self.bar_rest = (self.bar_rest + chunk).replace(b"\r", b"\n").split(b"\n")
        self.bar_rest = self.bar_rest[-MAX_LINE:]
        for piece in pieces:
            if len(self.distinct) < MAX_DISTINCT:
                self.distinct.add(hash(TIMES.sub(b"", piece)))
        *complete, self.rest = (self.rest + chunk).split(b"\n")
        if with_partial and self.rest:
            complete, self.rest = [*complete, self.rest], b""
        self.rest = self.rest[-MAX_LINE:]
        lines = [] if self.reports else [text(line) for line in complete]
        if self.without_report:
            for number, line in enumerate(lines):
                if REPORT.search(line) and FIRST_FAILED.search(line):
                    lines, self.reports = lines[:number], True
                    break
        if num_skipped:
            lines.insert(0, f"({num_skipped / 1e6:.1f} MB not shown; see {self.file})")
        return lines


class LogTail(NamedTuple):
    """The last lines before torchrun's report, and the rank that failed first."""

    lines: list[str]
    rank: int | None = None
    exit_code: int | None = None

    @property
    def end_reason(self) -> str | None:
        """Return the rank's exit code or signal in words; None if torchrun did not report one."""
        if self.exit_code is None:
            return None
        code = self.exit_code
        return f"exit code {code}" if code >= 0 else killed_by(-code)


def tail(log: Path, since: int = 0, count: int = 200) -> LogTail:
    """Return the last `count` lines of the attempt that began at byte `since` of the log."""
    if not log.exists():
        return LogTail([])
    with log.open("rb") as file:
        file.seek(max(since, file.seek(0, 2) - MAX_BYTES))
        lines = [text(line) for line in file.read().removesuffix(b"\n").split(b"\n")]
    end = next((n for n, line in enumerate(lines) if REPORT.search(line)), len(lines))
    shown = [line for line in lines[:end] if line.strip()][-count:]
    report = "\n".join(lines[end:])
    stopped = SIGNALLED.findall(report)
    killed = (match for match in KILLED.finditer(report) if match["pid"] not in stopped)
    first = next(killed, None) or FIRST_FAILED.search(report)
    return LogTail(shown, int(first["rank"]), int(first["code"])) if first else LogTail(shown)


def without_stop_traceback(lines: list[str]) -> list[str]:
    """Remove the traceback that torchrun prints on SIGTERM."""
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
    """Return the error that stopped vLLM's engine; None if these lines do not contain it."""
    return next((match[1] for line in lines if (match := ENGINE_ERROR.search(line))), None)


def killed_by(number: int) -> str:
    name = next((known.name for known in signal.Signals if known == number), "a real-time signal")
    return f"killed by signal {number} ({name})"


def text(line: bytes) -> str:
    """Return a line as printable text; for a progress bar, its last state."""
    moved = line.rstrip(b"\r").rpartition(b"\r")[2]
    return NOT_TEXT.sub("", moved[:MAX_LINE].decode(errors="replace"))
