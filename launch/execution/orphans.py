"""Find and end processes of runs whose launcher is gone, by a mark in their environment.

A guard next to the launcher ends them whenever the launcher dies. No signal to a group or
session reaches all of them, because torchrun gives each rank its own session. The next run waits
until guards have ended such processes, since they may be saving. It then kills what is left of
guards that were killed too.

The guard runs this file with the standard library alone, so it reads /proc without psutil.
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
# Empty scans in a row. During one scan, a process that forks and ends may fall between two entries
# of /proc.
SURE = 3
# Reading every process's environment takes 10 ms on a large machine.
GUARD_POLL_S = 0.2
# After SIGKILL. A process that waits inside the kernel, for a hung GPU, does not die.
DIES_WITHIN_S = 10.0


class _Marked(NamedTuple):
    """A process that carries a mark, and its process group."""

    pid: int
    group: int
    launcher: str
    process: str

    def carries(self, mark: dict[str, str]) -> bool:
        return (mark.get(LAUNCHER, self.launcher), mark.get(PROCESS, self.process)) == self[2:]


def mark(name: str) -> dict[str, str]:
    """Return the environment variables that mark a process as ours.

    SPT_NOENV keeps setproctitle, which vLLM's processes call, from writing their titles over the
    mark.
    """
    return {LAUNCHER: launcher(), PROCESS: f"{os.getpid()}/{name}", "SPT_NOENV": "1"}


def launcher() -> str:
    """Return a permanent identity of this process: its pid namespace, pid and start time."""
    return f"{_namespace()}:{identity(os.getpid())}"


def identity(pid: int) -> str | None:
    """Return pid and start time (clock ticks since boot); None if there is no such process."""
    stat = _stat(pid)
    return f"{pid}:{stat[19]}" if stat else None


def marked(mark: dict[str, str]) -> list[int]:
    """Return the living processes of this user that carry this mark."""
    return [process.pid for process in _all_marked() if process.carries(mark)]


def children(pid: int) -> list[str]:
    """Return the identities of a process's living children."""
    stats = ((folder.name, _stat(int(folder.name))) for folder in PROC.glob("[0-9]*"))
    return [f"{child}:{stat[19]}" for child, stat in stats if stat and stat[1] == str(pid)]


def kill(mark: dict[str, str]) -> list[int]:
    """Send SIGKILL to everything that carries this mark until nothing is left.

    Return the pids that do not die.
    """
    deadline, empty = time.monotonic() + DIES_WITHIN_S, 0
    leftovers: list[_Marked] = []
    while empty < SURE and time.monotonic() < deadline:
        leftovers = [process for process in _all_marked() if process.carries(mark)]
        empty = 0 if leftovers else empty + 1
        if leftovers:
            _kill(leftovers)
            time.sleep(POLL_S)
    return [process.pid for process in leftovers]


def remove() -> list[int]:
    """Kill leftovers of dead launchers, after waiting for their guards.

    Return the pids of the killed processes.
    """
    deadline = None
    while waits := _waits_of_guards({process.launcher for process in _left()}):
        if deadline is None:
            deadline = time.monotonic() + max(waits) + DIES_WITHIN_S
            note = "waiting for the processes of a launcher that was killed: they may be saving"
            print(note, file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            break
        time.sleep(GUARD_POLL_S)
    leftovers = _left()
    _kill(leftovers)
    return [process.pid for process in leftovers]


def _left() -> list[_Marked]:
    """Return processes whose launcher is known to be gone. Other namespaces are never known."""
    leftovers, namespace = [], _namespace()
    for process in _all_marked():
        namespace_of, _, launcher = process.launcher.partition(":")
        pid = launcher.partition(":")[0]
        if namespace_of == namespace and not (pid.isdigit() and identity(int(pid)) == launcher):
            leftovers.append(process)
    return leftovers


def _kill(processes: list[_Marked]) -> None:
    """Kill whole process groups, parents first.

    If killed one by one, processes could fork faster than they are found.
    """
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            if process.group != os.getpgrp():
                os.killpg(process.group, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def guarded(stop_timeout_s: float) -> Iterator[None]:
    """Run a guard that waits for this process to die and then ends the processes with its mark."""
    # Without site-packages, the guard starts before the first rank.
    argv = [sys.executable, "-SEP", str(Path(__file__).resolve()), launcher(), str(stop_timeout_s)]
    guard = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        # Send a byte, since a process that was forked meanwhile may hold the pipe open.
        guard.communicate(b"\n")


def guard(launcher: str, stop_timeout_s: float) -> None:
    """Wait for a byte or the end of stdin; then end process groups, the last started first."""
    # A service manager signals the guard too, while it waits for ranks that save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read(1)
    deadline = time.monotonic() + stop_timeout_s
    while stats := {p: _stat(p.pid) for p in _all_marked() if p.launcher == launcher}:
        # A group is as old as its oldest process.
        starts: dict[str, int] = {}
        for process, stat in stats.items():
            start = int(stat[19]) if stat else 0
            starts[process.process] = min(start, starts.get(process.process, start))
        newest = max(starts, key=lambda name: starts[name])
        parents = {p.pid: stat[1] for p, stat in stats.items() if stat and p.process == newest}
        for pid, parent in parents.items():
            # torchrun passes SIGTERM on to its ranks.
            if int(parent) not in parents:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        group = {LAUNCHER: launcher, PROCESS: newest}
        while marked(group) and time.monotonic() < deadline:
            time.sleep(GUARD_POLL_S)
        if kill(group):
            return


def _waits_of_guards(launchers: set[str]) -> list[float]:
    """Return the seconds that living guards of these launchers give their processes to end."""
    waits = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if words[2:3] and words[2].endswith("launch/execution/orphans.py"):
                waits += [float(words[4])] if words[3] in launchers else []
    return waits


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _stat(pid: int) -> list[str] | None:
    """Return /proc/<pid>/stat from its third field (state) on; None if the process is not alive."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def _all_marked() -> Iterator[_Marked]:
    """Yield this user's living processes that carry a mark.

    The youngest come first, because a process that forks and ends would be gone after the others
    are read.
    """
    for folder in sorted(PROC.glob("[0-9]*"), key=lambda entry: -int(entry.name)):
        stat = _stat(int(folder.name))
        try:
            if stat is None or folder.stat().st_uid != os.getuid():
                continue
            pairs = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended, or may not be read
            continue
        split = (pair.decode(errors="replace").partition("=") for pair in pairs)
        own = {name: value for name, _, value in split if name in (LAUNCHER, PROCESS)}
        if len(own) == 2:
            yield _Marked(int(folder.name), int(stat[2]), own[LAUNCHER], own[PROCESS])


if __name__ == "__main__":
    guard(sys.argv[1], float(sys.argv[2]))
