"""Kill the processes of launchers that died. A marker in their environment identifies them.

Every launcher has a guard, a process that stops the launcher's processes if it dies. No signal to a
group or session reaches all of them, because torchrun gives each rank its own session.

The next launcher waits for such guards, because the processes may still be saving. If a guard was
killed too, the next launcher kills the processes.

The guard runs this file with the standard library alone, so the file reads /proc without psutil.
"""

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
# Consecutive empty scans of /proc before we stop. One scan can miss a process that forks and exits.
EMPTY_SCANS = 3
GUARD_POLL_S = 0.2  # a scan takes 10 ms on a large machine
# SIGKILL has no effect while a process waits in the kernel, for example for a hung GPU.
KILL_TIMEOUT_S = 10.0


class _MarkedProcess(NamedTuple):
    """A process with a marker, and its process group."""

    pid: int
    group: int
    launcher: str
    process: str

    def carries(self, mark: dict[str, str]) -> bool:
        return (mark.get(LAUNCHER, self.launcher), mark.get(PROCESS, self.process)) == self[2:]


def mark(name: str) -> dict[str, str]:
    """Return the environment variables that mark a process of the group `name` as ours.

    vLLM calls setproctitle, which would overwrite the marker without SPT_NOENV.
    """
    return {LAUNCHER: launcher(), PROCESS: f"{os.getpid()}/{name}", "SPT_NOENV": "1"}


def launcher() -> str:
    """Identify this process by pid namespace, pid and start time, because pids are reused."""
    return f"{_namespace()}:{identity(os.getpid())}"


def identity(pid: int) -> str | None:
    """Return `pid:start time` in clock ticks since boot; None if the process is not alive."""
    stat = _stat(pid)
    return f"{pid}:{stat[19]}" if stat else None


def marked(mark: dict[str, str]) -> list[int]:
    """Return the pids of this user's live processes that carry the marker."""
    return [process.pid for process in _all_marked() if process.carries(mark)]


def children(pid: int) -> list[str]:
    """Return the identities of a process's live children."""
    stats = ((folder.name, _stat(int(folder.name))) for folder in PROC.glob("[0-9]*"))
    return [f"{child}:{stat[19]}" for child, stat in stats if stat and stat[1] == str(pid)]


def kill(mark: dict[str, str]) -> list[int]:
    """Kill every process that carries the marker; return the pids that survive."""
    deadline, num_empty = time.monotonic() + KILL_TIMEOUT_S, 0
    leftovers: list[_MarkedProcess] = []
    while num_empty < EMPTY_SCANS and time.monotonic() < deadline:
        leftovers = [process for process in _all_marked() if process.carries(mark)]
        num_empty = 0 if leftovers else num_empty + 1
        if leftovers:
            _kill(leftovers)
            time.sleep(POLL_S)
    return [process.pid for process in leftovers]


def remove() -> list[int]:
    """Wait for the guards of dead launchers, then kill what is left; return the killed pids."""
    deadline = None
    while timeouts := _guard_timeouts({process.launcher for process in _orphans()}):
        if deadline is None:
            deadline = time.monotonic() + max(timeouts) + KILL_TIMEOUT_S
            note = "waiting for processes of a launcher that died, because they may be saving"
            print(note, file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            break
        time.sleep(GUARD_POLL_S)
    leftovers = _orphans()
    _kill(leftovers)
    return [process.pid for process in leftovers]


def _orphans() -> list[_MarkedProcess]:
    """Return processes of dead launchers in this pid namespace; others cannot be checked."""
    leftovers, namespace = [], _namespace()
    for process in _all_marked():
        namespace_of, _, launcher = process.launcher.partition(":")
        pid = launcher.partition(":")[0]
        if namespace_of == namespace and not (pid.isdigit() and identity(int(pid)) == launcher):
            leftovers.append(process)
    return leftovers


def _kill(processes: list[_MarkedProcess]) -> None:
    """Kill complete process groups, parents first, because single processes could fork faster."""
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            if process.group != os.getpgrp():
                os.killpg(process.group, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def guarded(stop_timeout_s: float) -> Iterator[None]:
    """Run a guard that stops the processes of this launcher if the launcher dies."""
    # -S skips site-packages, so the guard is ready before the first rank starts.
    argv = [sys.executable, "-SEP", str(Path(__file__).resolve()), launcher(), str(stop_timeout_s)]
    guard = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        # Closing the pipe is not enough, because a forked process may hold it open.
        guard.communicate(b"\n")


def guard(launcher: str, stop_timeout_s: float) -> None:
    """Wait for a byte or the end of stdin, then terminate process groups, youngest first."""
    # A service manager signals the guard too, but the guard has to outlive ranks that save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read(1)
    deadline = time.monotonic() + stop_timeout_s
    while stats := {p: _stat(p.pid) for p in _all_marked() if p.launcher == launcher}:
        starts: dict[str, int] = {}  # of the oldest process of each group
        for process, stat in stats.items():
            start = int(stat[19]) if stat else 0
            starts[process.process] = min(start, starts.get(process.process, start))
        newest = max(starts, key=lambda name: starts[name])
        parents = {p.pid: stat[1] for p, stat in stats.items() if stat and p.process == newest}
        for pid, parent in parents.items():
            # Signal only torchrun, which forwards SIGTERM to its ranks.
            if int(parent) not in parents:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        group = {LAUNCHER: launcher, PROCESS: newest}
        while marked(group) and time.monotonic() < deadline:
            time.sleep(GUARD_POLL_S)
        if kill(group):
            return


def _guard_timeouts(launchers: set[str]) -> list[float]:
    """Return the stop timeouts, in seconds, of the live guards of these launchers."""
    timeouts = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just exited
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if words[2:3] and words[2].endswith("launch/execution/orphans.py"):
                timeouts += [float(words[4])] if words[3] in launchers else []
    return timeouts


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from `state` on; None if the process is not alive."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def _all_marked() -> Iterator[_MarkedProcess]:
    """Yield this user's live processes that carry a marker, highest pids first.

    A process that forks and exits would otherwise be gone before the scan reaches it.
    """
    for folder in sorted(PROC.glob("[0-9]*"), key=lambda entry: -int(entry.name)):
        stat = _stat(int(folder.name))
        try:
            if stat is None or folder.stat().st_uid != os.getuid():
                continue
            pairs = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has just exited or is not readable
            continue
        split = (pair.decode(errors="replace").partition("=") for pair in pairs)
        marks = {name: value for name, _, value in split if name in (LAUNCHER, PROCESS)}
        if len(marks) == 2:
            yield _MarkedProcess(int(folder.name), int(stat[2]), marks[LAUNCHER], marks[PROCESS])


if __name__ == "__main__":
    guard(sys.argv[1], float(sys.argv[2]))
