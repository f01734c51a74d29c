"""Run programs that log to files, watch their progress, and stop all of their processes."""

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
STOP_TIMEOUT_S = 60.0  # from SIGTERM to SIGKILL, so that vLLM's engines can stop their processes
# From SIGKILL to giving up, because a process that waits in the kernel for a hung GPU cannot die.
KILL_TIMEOUT_S = 30.0
# Environment variable that marks all descendants of a program; each nested program adds a line.
# Signals to the process group are not enough, because torchrun and vLLM start new sessions.
MARK = "RECIPES_TRIAL"
ERROR_TEXT = re.compile(r"(?:\b\w*(?:Error|Exception)|\berror): .*")
UNINFORMATIVE = ("Engine core initialization failed", "See root cause above", "Failed core proc")


def marked_processes(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's process, or it has just ended
            if mark in process.environ().get(MARK, "").split("\n"):
                processes.append(process)
    return processes


class MarkedProgram:
    """A program in its own session, whose descendants a marker in the environment identifies."""

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
        return failure_reason(self.log, self.popen.returncode) if self.popen.poll() else None

    def end(self) -> None:
        """Stop the program and all of its processes, which would otherwise occupy GPU memory.

        Raise Failed if processes are still alive KILL_TIMEOUT_S after SIGKILL.
        """
        if not self.ended():
            os.killpg(self.popen.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_TIMEOUT_S)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while remaining := marked_processes(str(self.log)):
            for process in remaining:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if time.monotonic() > deadline:
                pids = [process.pid for process in remaining]
                raise Failed(
                    f"{self.log}: processes {pids} survived SIGKILL. Reboot to free the GPU."
                )
            psutil.wait_procs(remaining, POLL_S)
        self.popen.wait()


def wait(
    processes: Sequence[MarkedProgram],
    done: Callable[[], bool],
    heartbeat: Path,
    timeout_s: float = math.inf,
    patience_s: float = math.inf,
    files: Sequence[Path] = (),
) -> None:
    """Wait until `done` returns true. While logs or `files` change, touch `heartbeat`.

    The launcher's watchdog reads the heartbeat. Raise UserError if a process fails, `timeout_s` has
    passed, or nothing has changed for `patience_s`. Raise Interrupted after a signal. All processes
    are stopped before an exception.
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
                raise UserError(f"hung: logs have not changed for {patience_s:.0f} s")
            if now - start > timeout_s:
                log = processes[0].log.name
                raise UserError(
                    f"still running after method.args.timeout_s={timeout_s:g} s; see logs/{log}"
                )
            time.sleep(POLL_S)
    except BaseException:
        for process in processes:
            process.end()
        raise


def failure_reason(log: Path, code: int) -> str:
    """Return why a program failed: the error that a rank reported, or a line of its log."""
    reports = [json.loads(path.read_text()) for path in log.parent.glob("failures/rank*.json")]
    # The first rank to fail knows the cause. The others only report the lost connection.
    reports.sort(key=lambda report: report["time"])
    if (result := log.with_name("result.json")).exists():
        reports.append(json.loads(result.read_text()))
    reported = [str(report["error"]) for report in reports if report.get("error")]
    if any("OutOfMemoryError" in error for error in reported):
        return OUT_OF_MEMORY
    if reported:
        return reported[0].splitlines()[0][:300]
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [match.group(0) for line in lines if (match := ERROR_TEXT.search(line))]
    informative = [line for line in errors if not any(phrase in line for phrase in UNINFORMATIVE)]
    last = (informative or errors or lines or ["no output"])[-1][:300]
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{last} ({end}; {log.parent.name}/{log.name})"
