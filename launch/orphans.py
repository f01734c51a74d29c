"""Processes of runs whose launcher is gone. Each one of ours carries a mark in its environment, which its children inherit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

LAUNCHER, PROCESS = "ROCM_RECIPES_LAUNCHER", "ROCM_RECIPES_PROCESS"
PROC = Path("/proc")


def mark(name: str) -> dict[str, str]:
    """The environment that says whose process it is: the launcher by pid and start time, since pids come again."""
    return {LAUNCHER: identity(os.getpid()) or "", PROCESS: f"{os.getpid()}/{name}"}


def identity(pid: int) -> str | None:
    """pid and start time (clock ticks since boot: field 22 of /proc/<pid>/stat); None where there is no such process."""
    try:
        after_name = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] == "Z" else f"{pid}:{after_name[19]}"


def marked(wanted: dict[str, str]) -> list[int]:
    """Living processes of this user that carry this mark."""
    return [pid for pid, found in _environments() if all(found.get(name) == value for name, value in wanted.items())]


def remove() -> list[int]:
    """Kill what launchers that are gone have left. Returns the pids."""
    left = [pid for pid, found in _environments() if LAUNCHER in found and not _lives(found[LAUNCHER])]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _lives(launcher: str) -> bool:
    pid = launcher.partition(":")[0]
    return pid.isdigit() and identity(int(pid)) == launcher


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    for folder in PROC.glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid() or identity(int(folder.name)) is None:
                continue
            pairs = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or may not be read
            continue
        found = (pair.decode(errors="replace").partition("=") for pair in pairs)
        yield int(folder.name), {name: value for name, _, value in found if name in (LAUNCHER, PROCESS)}
