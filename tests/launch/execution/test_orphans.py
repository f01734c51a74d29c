"""Test that what a launcher leaves is found by its mark and killed, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from launch.execution import orphans
from tests.conftest import ROOT
from tests.helpers.supervised import eventually

SLEEPS = "import time\nprint('up', flush=True)\nwhile True: time.sleep(1)"
# Leaves its parent, its session and its terminal, as a daemon does.
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


def of(launcher: str, name: str = "1/trainers") -> dict[str, str]:
    return {**orphans.mark("x"), orphans.LAUNCHER: launcher, orphans.PROCESS: name}


def gone_launcher() -> str:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = f"{orphans._namespace()}:{orphans.identity(child.pid)}"
        child.communicate(b"\n")
    return found


def test_a_process_by_its_pid_and_when_it_started():
    ours = orphans.identity(os.getpid())
    assert ours == orphans.identity(os.getpid())
    assert ours.startswith(f"{os.getpid()}:")
    assert orphans.identity(2**22 + 1) is None, "the largest pid is 2**22"


def test_a_dead_process_that_nobody_waited_for_is_none():
    child = subprocess.Popen([sys.executable, "-c", ""])
    assert eventually(lambda: orphans.identity(child.pid) is None)
    child.wait()


def test_a_name_that_looks_like_the_fields_after_it(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "30"])
    try:
        assert orphans.children(os.getpid()).count(orphans.identity(child.pid)) == 1
    finally:
        child.kill()
        child.wait()


def test_what_launchers_that_are_gone_have_left_is_killed(start):
    left = start(SLEEPS, **of(gone_launcher()))
    daemon = start(DAEMON, **of(launcher := gone_launcher()))
    daemon.wait()
    assert eventually(lambda: len(orphans.marked({orphans.LAUNCHER: launcher})) == 1), (
        "its parents end after it is up"
    )
    (pid,) = orphans.marked({orphans.LAUNCHER: launcher})
    assert {left.pid, pid} <= set(orphans.remove())
    assert left.wait(10) == -signal.SIGKILL
    assert eventually(lambda: orphans.identity(pid) is None)


def test_what_a_guard_is_ending_may_save_first(start, tmp_path, capfd):
    saved = tmp_path / "saved"
    saves = (
        "import pathlib, signal, sys, time\ndef save(*_): time.sleep(0.3); "
        f"pathlib.Path({str(saved)!r}).touch(); sys.exit()\n"
    )
    left = start(
        f"{saves}signal.signal(signal.SIGTERM, save)\n{SLEEPS}", **of(launcher := gone_launcher())
    )
    guard = subprocess.Popen(
        [sys.executable, "-SEP", orphans.__file__, launcher, "20"], stdin=subprocess.PIPE
    )
    assert eventually(lambda: orphans._waits_of_guards({launcher}))
    guard.stdin.close()  # as when the launcher dies
    assert left.pid not in orphans.remove()
    assert saved.exists()
    assert (left.wait(10), guard.wait(10)) == (0, 0)
    assert "they may be saving" in capfd.readouterr().err


def test_a_guard_that_never_ends_is_not_waited_for_for_ever(start, monkeypatch):
    """A process that its launcher forked may hold the pipe whose end the guard waits for."""
    monkeypatch.setattr(orphans, "DIES_WITHIN_S", 0.1)
    left = start(SLEEPS, **of(launcher := gone_launcher()))
    argv = [sys.executable, "-SEP", orphans.__file__, launcher, "0.2"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as guard:
        assert eventually(lambda: orphans._waits_of_guards({launcher}))
        assert left.pid in orphans.remove()
        guard.kill()


FORKS = """
import os, time
from launch.execution import orphans
with orphans.guarded(stop_timeout_s=5):
    child = os.fork()
    if child == 0:
        time.sleep(600)
os.kill(child, 9)
"""


def test_the_guard_ends_though_a_forked_process_holds_its_pipe():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", FORKS], env=env, timeout=60).returncode == 0


def test_what_is_left_alone(start):
    """Leave processes of a living launcher, of one in another namespace, and of nobody."""
    mine = start(SLEEPS, **of(orphans.launcher()))
    elsewhere = start(SLEEPS, **of(f"{orphans._namespace()}1:57:12345"))
    nobodys = start(SLEEPS)
    odd = start(SLEEPS, **of("what is this"))
    assert not {mine.pid, elsewhere.pid, nobodys.pid, odd.pid} & set(orphans.remove())
    assert [child.poll() for child in (mine, elsewhere, nobodys, odd)] == [None] * 4


def test_a_pid_that_came_again_is_not_the_launcher(start):
    left = start(SLEEPS, **of(f"{orphans._namespace()}:{os.getpid()}:1"))
    assert left.pid in orphans.remove()


def test_a_process_that_changes_its_title_is_still_found(start):
    """The title of vLLM's engine would overwrite the environment that holds the mark."""
    pytest.importorskip("setproctitle", reason="setproctitle is not installed here")
    titled = f"import setproctitle\nsetproctitle.setproctitle('VLLM::EngineCore ' * 50)\n{SLEEPS}"
    child = start(titled, **orphans.mark("server"))
    assert orphans.marked(orphans.mark("server")) == [child.pid]
    assert orphans.kill(orphans.mark("server")) == []
    assert child.wait(10) == -signal.SIGKILL


def test_one_that_forks_all_the_time_is_killed(start):
    forks = (
        "import os, time\nprint('up', flush=True)\nwhile True:\n    if os.fork():\n        "
        "time.sleep(0.005)\n        os._exit(0)"
    )
    start(forks, **orphans.mark("forks"))
    assert orphans.kill(orphans.mark("forks")) == []
    assert orphans.marked(orphans.mark("forks")) == []


def test_the_guard_does_nothing_while_its_launcher_lives_and_ends_with_it(start):
    with orphans.guarded(stop_timeout_s=5):
        (guard,) = [
            pid
            for pid in map(
                int, (child.partition(":")[0] for child in orphans.children(os.getpid()))
            )
            if is_guard(pid)
        ]
        os.kill(guard, signal.SIGTERM)  # a service manager's, to all of us
        child = start(SLEEPS, **orphans.mark("trainers"))
        assert child.poll() is None
        child.kill()
        child.wait()
    assert orphans.identity(guard) is None


def is_guard(pid: int) -> bool:
    """Return whether it is a guard that already ignores SIGTERM."""
    with open(f"/proc/{pid}/cmdline") as file:
        if "orphans.py" not in file.read():
            return False

    def ignores() -> int:
        with open(f"/proc/{pid}/status") as file:
            ignored = next(line.split()[1] for line in file if line.startswith("SigIgn:"))
        return int(ignored, 16) >> (signal.SIGTERM - 1) & 1

    return eventually(ignores)
