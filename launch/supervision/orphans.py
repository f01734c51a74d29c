"""Processes of runs whose launcher is gone. Each one of ours carries a mark in its environment, which its children inherit.

A guard beside the launcher ends them when it dies, however it dies: ranks have sessions of their own (torchrun gives them those), so no
signal to a group or a session reaches all. The next run to start waits for what a guard is ending, which may be saving, and kills what a
guard that was killed too has left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LAUNCHER, PROCESS = "ROCM_RECIPES_OWNER", "ROCM_RECIPES_PROCESS"
PROC = Path("/proc")
POLL_S = 0.05
SURE = 3  # empty looks in a row: one that forks and ends may be between two entries of /proc in one of them
GUARD_POLL_S = 0.2  # reading every process's environment takes a hundredth of a second on a large machine
DIES_WITHIN_S = 10.0  # of SIGKILL; one that waits inside the kernel, for a GPU that hangs, does not


class _Marked(NamedTuple):
    """A process that carries a mark, and its process group."""

    pid: int
    group: int
    launcher: str
    process: str

    def carries(self, wanted: dict[str, str]) -> bool:
        return self.launcher == wanted.get(LAUNCHER, self.launcher) and self.process == wanted.get(PROCESS, self.process)


def mark(name: str) -> dict[str, str]:
    """The environment that says whose process it is.

    SPT_NOENV keeps setproctitle, which vLLM's processes call, from writing their titles over it.
    """
    return {LAUNCHER: launcher(), PROCESS: f"{os.getpid()}/{name}", "SPT_NOENV": "1"}


def launcher() -> str:
    """This process, by what no other will ever be: its namespace (containers count pids for themselves), pid and start time."""
    return f"{_namespace()}:{identity(os.getpid())}"


def identity(pid: int) -> str | None:
    """pid and start time (clock ticks since boot: field 22 of /proc/<pid>/stat); None where there is no such process."""
    state = _stat(pid)
    return f"{pid}:{state[19]}" if state else None


def marked(wanted: dict[str, str]) -> list[int]:
    """Living processes of this user that carry this mark."""
    return [one.pid for one in _all_marked() if one.carries(wanted)]


def children(pid: int) -> list[str]:
    """Identities of its living children."""
    found = ((int(folder.name), _stat(int(folder.name))) for folder in PROC.glob("[0-9]*"))
    return [f"{child}:{state[19]}" for child, state in found if state and state[1] == str(pid)]


def kill(wanted: dict[str, str]) -> list[int]:
    """SIGKILL to all that carry this mark, until none is left. Returns those that do not die."""
    deadline, empty = time.monotonic() + DIES_WITHIN_S, 0
    left: list[_Marked] = []
    while empty < SURE and time.monotonic() < deadline:
        left = [one for one in _all_marked() if one.carries(wanted)]
        if left:
            empty = 0
            _kill(left)
            time.sleep(POLL_S)
        else:
            empty += 1
    return [one.pid for one in left]


def remove() -> list[int]:
    """Kill what launchers that are gone have left, after waiting for what their guards are ending. Returns the pids."""
    told = False
    while _ending() & {one.launcher for one in _left()}:
        if not told:
            print("waiting for the processes of a launcher that was killed: they may be saving", file=sys.stderr, flush=True)
        told = True
        time.sleep(GUARD_POLL_S)  # a guard's own time is bounded: runtime.stop_timeout_s
    left = _left()
    _kill(left)
    return [one.pid for one in left]


def _left() -> list[_Marked]:
    return [one for one in _all_marked() if _gone(one.launcher)]


def _kill(marked: list[_Marked]) -> None:
    """With their process groups, at once: one by one they may fork faster than they are found. Parents come before their children."""
    for one in reversed(marked):
        with contextlib.suppress(ProcessLookupError):
            if one.group != os.getpgrp():
                os.killpg(one.group, signal.SIGKILL)
            else:
                os.kill(one.pid, signal.SIGKILL)


@contextlib.contextmanager
def guarded(stop_timeout_s: float) -> Iterator[None]:
    """While this lasts, a guard waits for this process to die; then it ends what carries its mark, as the launcher would have."""
    # By its file, and without site-packages: it needs the standard library only, and has started before the first rank has.
    argv = [sys.executable, "-SEP", str(Path(__file__).resolve()), launcher(), str(stop_timeout_s)]
    guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        # What tells it that we are gone is the end of this pipe, of which no other process has this side.
        guard.communicate()


def guard(of: str, stop_timeout_s: float) -> None:
    """Wait until stdin ends; then SIGTERM to process groups one by one, the last that started first, and SIGKILL when the time is over."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a service manager sends it to all of us; ranks that save are waited for
    sys.stdin.buffer.read()
    deadline = time.monotonic() + stop_timeout_s
    while groups := _groups(of):
        newest = max(groups, key=lambda name: min(map(_started, groups[name])))
        _ask(groups[newest])
        group = {LAUNCHER: of, PROCESS: newest}
        while marked(group) and time.monotonic() < deadline:
            time.sleep(GUARD_POLL_S)
        if kill(group):
            return


def _ending() -> set[str]:
    """Launchers whose guard lives."""
    found = set()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if len(words) > 3 and words[2].endswith("launch/supervision/orphans.py"):
                found.add(words[3])
    return found


def _groups(of: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in _all_marked():
        if one.launcher == of:
            found.setdefault(one.process, []).append(one.pid)
    return found


def _ask(pids: list[int]) -> None:
    """SIGTERM to those whose parent is none of them: torchrun passes it on."""
    for pid in pids:
        state = _stat(pid)
        if state and int(state[1]) not in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _started(pid: int) -> int:
    state = _stat(pid)
    return int(state[19]) if state else 0


def _gone(launcher: str) -> bool:
    """Of a launcher in another namespace nothing is known here: its processes are left alone."""
    namespace, _, wanted = launcher.partition(":")
    pid = wanted.partition(":")[0]
    return namespace == _namespace() and not (pid.isdigit() and identity(int(pid)) == wanted)


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _stat(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from its third field (state) on; None where there is no such process, or it is dead and not waited for."""
    try:
        after_name = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else after_name


def _all_marked() -> Iterator[_Marked]:
    """Living processes of this user that carry a mark. The youngest first: one that forks and ends would be gone by the time the others are
    read.
    """
    for folder in sorted(PROC.glob("[0-9]*"), key=lambda entry: -int(entry.name)):
        state = _stat(int(folder.name))
        try:
            if state is None or folder.stat().st_uid != os.getuid():
                continue
            pairs = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or may not be read
            continue
        split = (pair.decode(errors="replace").partition("=") for pair in pairs)
        found = {name: value for name, _, value in split if name in (LAUNCHER, PROCESS)}
        if len(found) == 2:
            yield _Marked(int(folder.name), int(state[2]), found[LAUNCHER], found[PROCESS])


if __name__ == "__main__":
    guard(sys.argv[1], float(sys.argv[2]))
