"""Test that only the processes of dead launchers are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.execution import orphans
from tests.conftest import ROOT
from tests.helpers.supervised import eventually

SLEEPS = "import time\nprint('up', flush=True)\nwhile True: time.sleep(1)"
# Starts a daemon without a parent, session or terminal.
DAEMON = (
    f"import os, sys\nif os.fork(): sys.exit(0)\nos.setsid()\nif os.fork(): sys.exit(0)\n{SLEEPS}"
)


@pytest.fixture
def start():
    started = []

    def call(script: str, **mark: str) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **mark},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append((child, mark))
        assert child.stdout.readline() == b"up\n"
        return child

    yield call
    for child, mark in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        for pid in orphans.marked(mark) if mark else []:
            os.kill(pid, signal.SIGKILL)
        child.communicate(timeout=10)


def mark_of(launcher: str, name: str = "1/trainers") -> dict[str, str]:
    return {**orphans.mark("x"), orphans.LAUNCHER: launcher, orphans.PROCESS: name}


def dead_launcher() -> str:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        launcher = f"{orphans._namespace()}:{orphans.identity(child.pid)}"
        child.communicate(b"\n")
    return launcher


def test_identity_of_a_process(tmp_path):
    assert orphans.identity(os.getpid()).startswith(f"{os.getpid()}:")
    assert orphans.identity(2**22 + 1) is None, "the largest pid is 2**22"
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    assert eventually(lambda: orphans.identity(zombie.pid) is None)
    zombie.wait()
    program = tmp_path / "a) R 1 (b"  # like the fields that follow a name in /proc/<pid>/stat
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "30"])
    try:
        assert orphans.children(os.getpid()).count(orphans.identity(child.pid)) == 1
    finally:
        child.kill()
        child.wait()


def test_processes_of_dead_launchers_are_killed(start):
    left = start(SLEEPS, **mark_of(dead_launcher()))
    reused_pid = start(SLEEPS, **mark_of(f"{orphans._namespace()}:{os.getpid()}:1"))
    daemon = start(DAEMON, **mark_of(launcher := dead_launcher()))
    daemon.wait()
    assert eventually(lambda: len(orphans.marked({orphans.LAUNCHER: launcher})) == 1)
    (pid,) = orphans.marked({orphans.LAUNCHER: launcher})
    assert {left.pid, reused_pid.pid, pid} <= set(orphans.remove())
    assert left.wait(10) == -signal.SIGKILL
    assert eventually(lambda: orphans.identity(pid) is None)


def test_a_guard_lets_processes_save(start, tmp_path, capfd):
    saved = tmp_path / "saved"
    saves = (
        "import pathlib, signal, sys, time\ndef save(*_): time.sleep(0.3); "
        f"pathlib.Path({str(saved)!r}).touch(); sys.exit()\n"
    )
    left = start(
        f"{saves}signal.signal(signal.SIGTERM, save)\n{SLEEPS}",
        **mark_of(launcher := dead_launcher()),
    )
    with guard_of(launcher, "20") as guard:
        guard.stdin.close()  # as if the launcher died
        assert left.pid not in orphans.remove()
        assert saved.exists()
        assert (left.wait(10), guard.wait(10)) == (0, 0)


@contextlib.contextmanager
def guard_of(launcher: str, stop_timeout_s: str) -> Iterator[subprocess.Popen]:
    argv = [sys.executable, "-SEP", orphans.__file__, launcher, stop_timeout_s]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as guard:
        assert eventually(lambda: orphans._guard_timeouts({launcher}))
        yield guard


FORKS = """
import os, time
from launch.execution import orphans
with orphans.guarded(stop_timeout_s=5):
    child = os.fork()
    if child == 0:
        time.sleep(600)
os.kill(child, 9)
"""


def test_the_guard_ends_even_if_a_forked_process_holds_its_pipe():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", FORKS], env=env, timeout=60).returncode == 0


def test_other_processes_are_not_killed(start):
    """They have a live launcher, one in another namespace, no launcher, or an invalid mark."""
    owners = (orphans.launcher(), f"{orphans._namespace()}1:57:12345", "what is this")
    marks = [{}, *map(mark_of, owners)]
    children = [start(SLEEPS, **mark) for mark in marks]
    assert not {child.pid for child in children} & set(orphans.remove())
    assert [child.poll() for child in children] == [None] * 4


def test_a_process_that_changes_its_title_is_still_found(start):
    """The title of vLLM's engine would overwrite the mark in the environment."""
    pytest.importorskip("setproctitle", reason="setproctitle is not installed here")
    titled = f"import setproctitle\nsetproctitle.setproctitle('VLLM::EngineCore ' * 50)\n{SLEEPS}"
    child = start(titled, **orphans.mark("server"))
    assert orphans.marked(orphans.mark("server")) == [child.pid]
    assert orphans.kill(orphans.mark("server")) == []
    assert child.wait(10) == -signal.SIGKILL


def test_the_guard_ignores_sigterm_and_ends_with_its_launcher(start):
    with orphans.guarded(stop_timeout_s=5):
        pids = [int(child.partition(":")[0]) for child in orphans.children(os.getpid())]
        (guard,) = [pid for pid in pids if "orphans.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert eventually(lambda: ignores_sigterm(guard))
        os.kill(guard, signal.SIGTERM)  # a service manager signals every process
        child = start(SLEEPS, **orphans.mark("trainers"))
        assert child.poll() is None
        child.kill()
        child.wait()
    assert orphans.identity(guard) is None


def ignores_sigterm(pid: int) -> int:
    ignored = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    return int(ignored, 16) >> (signal.SIGTERM - 1) & 1
