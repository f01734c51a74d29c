"""Run programs that log to files, watch them, and end all of their processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from launch.core.errors import UserError
from recipes.bench.benchmark import OUT_OF_MEMORY
from recipes.rank.program import Failed, Interrupted, stop_requested

POLL_S = 0.1
STOP_TIMEOUT_S = 60.0  # from SIGTERM to SIGKILL: vLLM's engines have processes to end
DIES_WITHIN_S = 30.0  # after SIGKILL; a process that waits in the kernel for a hung GPU may not
# An environment variable with a line for each program that started a process, directly or not.
# torchrun and vLLM start new sessions, so a signal to one process group does not reach all.
MARK = "RECIPES_TRIAL"
SAYS_WHY = re.compile(r"(?:\b\w*(?:Error|Exception)|\berror): .*")
SAYS_NOTHING = ("Engine core initialization failed", "See root cause above", "Failed core proc")


def marked(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or one that just ended
            if mark in process.environ().get(MARK, "").split("\n"):
                processes.append(process)
    return processes


class Process:
    """Run a program in its own session, so that all of its processes can be ended."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        mark = f"{env.get(MARK, '')}\n{log}"
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                list(argv),
                env={**env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def ended(self) -> bool:
        return self.popen.poll() is not None

    def failure(self) -> str | None:
        """Return the reason if the program has failed, else None."""
        return why(self.log, self.popen.returncode) if self.popen.poll() else None

    def end(self) -> None:
        """End the program and its leftovers, which would hold GPU memory."""
        if not self.ended():
            os.killpg(self.popen.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_TIMEOUT_S)
        deadline = time.monotonic() + DIES_WITHIN_S
        while remaining := marked(str(self.log)):
            for process in remaining:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if time.monotonic() > deadline:
                raise Failed(f"{remaining} of {self.log} do not end, and hold their GPU memory")
            psutil.wait_procs(remaining, POLL_S)
        self.popen.wait()


def wait(
    processes: Sequence[Process],
    done: Callable[[], bool],
    heartbeat: Path,
    timeout_s: float = math.inf,
    patience_s: float = math.inf,
    files: Sequence[Path] = (),
) -> None:
    """Wait until `done`, and touch `heartbeat` while logs and `files` change, for the watchdog.

    Raise UserError if a process fails, if it takes `timeout_s`, or if nothing changes for
    `patience_s`, and Interrupted after a signal, once all processes have ended.
    """
    files = [*files, *(process.log for process in processes)]
    start = changed = time.monotonic()
    times: list[int] = []
    try:
        while True:
            finished, now = done(), time.monotonic()
            failures = [failure for process in processes if (failure := process.failure())]
            if failures:
                raise UserError(failures[0])
            if finished:
                return
            if stop_requested():
                raise Interrupted
            if times != (times := [path.stat().st_mtime_ns for path in files if path.exists()]):
                changed = now
                heartbeat.touch()
            if now - changed > patience_s:
                raise UserError(f"hung: no progress for {patience_s:.0f} s")
            if now - start > timeout_s:
                log = processes[0].log.name
                raise UserError(
                    f"still running after {timeout_s:g} s (method.args.timeout_s); logs/{log}"
                )
            time.sleep(POLL_S)
    except BaseException:
        for process in processes:
            process.end()
        raise


def why(log: Path, code: int) -> str:
    """Return the reason of a failure: a rank's report, or the log's last informative line."""
    reports = [json.loads(path.read_text()) for path in log.parent.glob("failures/rank*.json")]
    # The first rank to fail has the cause; the others only report the lost connection.
    reports.sort(key=lambda report: report["time"])
    if (result := log.with_name("result.json")).exists():
        reports.append(json.loads(result.read_text()))
    reported = [str(report["error"]) for report in reports if report.get("error")]
    if any("OutOfMemoryError" in error for error in reported):
        return OUT_OF_MEMORY
    if reported:
        return reported[0].splitlines()[0][:300]
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [match.group(0) for line in lines if (match := SAYS_WHY.search(line))]
    informative = [line for line in errors if not any(phrase in line for phrase in SAYS_NOTHING)]
    last = (informative or errors or lines or ["no output"])[-1][:300]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{last} ({how}; {log.parent.name}/{log.name})"
