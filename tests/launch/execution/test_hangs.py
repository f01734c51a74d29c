"""Test runs without progress: when the watchdog ends them, and what they leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.execution import contained, execute, supervise
from launch.execution.local import LocalProcess
from launch.execution.progress import Progress
from tests.helpers.supervised import DONE, FOREVER, QUICK, SERVER, eventually, executed, plan_of

pytestmark = pytest.mark.usefixtures("quick_supervision", "told_when_up")
UP = "print('up', flush=True)\n"


def up(started):
    """Wait until a process has said something, or has ended: its start counts for no hang."""
    eventually(lambda: started.log.stat().st_size or started.poll() is not None)
    return started


@pytest.fixture
def told_when_up(monkeypatch):
    monkeypatch.setattr(
        execute, "LocalProcess", lambda process, log: up(LocalProcess(process, log))
    )


def test_a_server_that_never_answers(tmp_path, capsys):
    server = (
        "print('loading the weights', flush=True)\nwhile True:\n"
        "    print('waiting for the engine (5 s)', flush=True); time.sleep(0.05)"
    )
    plan = plan_of(
        tmp_path, {"server": server, "trainers": DONE}, QUICK, "runtime.hang_timeout_s=1"
    )
    code, record = executed(plan)
    assert (code, record["status"], record["exit_code"]) == (5, "hung", 5)
    said = capsys.readouterr().out
    assert "server hung: no step, no token and no load progress for 1 s" in said
    assert "  | waiting for the engine (5 s)" in said


def test_a_server_that_loads_for_longer_than_the_timeout(tmp_path):
    server = (
        "import http.server\nfor shard in range(15):\n    print(f'shard {shard} of 15', "
        "flush=True); time.sleep(0.1)\n" + SERVER
    )
    code, _ = executed(
        plan_of(
            tmp_path, {"server": server, "trainers": UP + DONE}, QUICK, "runtime.hang_timeout_s=1"
        )
    )
    assert code == 0


def test_a_rank_that_hangs_leaves_its_stacks(tmp_path, capsys):
    rank = UP + (
        "def stuck_here():\n    forever()\nos.environ.clear()\n(run / "
        "'heartbeat').touch()\nstuck_here()"
    )
    plan = plan_of(tmp_path, {"trainers": rank}, QUICK, "runtime.hang_timeout_s=1")
    code, record = executed(plan)
    assert (code, record["status"]) == (5, "hung")
    (stacks,) = (tmp_path / "stacks").iterdir()
    assert "stuck_here" in stacks.read_text()
    assert f"stacks of trainers are in {tmp_path / 'stacks'}" in capsys.readouterr().out


def test_what_hung_is_started_again(tmp_path, capfd):
    """The first attempt marks that it was there, and hangs."""
    rank = UP + "if not (run / 'before').exists():\n    (run / 'before').touch()\n    forever()\n"
    code, record = executed(
        plan_of(
            tmp_path,
            {"trainers": rank + DONE},
            QUICK,
            "runtime.hang_timeout_s=1",
            "runtime.max_restarts=1",
        )
    )
    assert (code, record["status"], record["restarts"]) == (0, "done", 1)
    said = capfd.readouterr()
    assert "restart 1 of 1, from the newest whole checkpoint" in said.out + said.err
    assert list((tmp_path / "stacks").iterdir())


def test_stacks_are_where_each_process_says_and_one_that_has_ended_is_left_out(tmp_path):
    """Containers print stacks into the log; a failing engine hides no other's stacks."""

    class Prints(LocalProcess):
        def dump_stacks(self, folder):
            return None

    class Gone(LocalProcess):
        def dump_stacks(self, folder):
            raise OSError("the engine is gone")

    kinds = {"prepare": Gone, "server": Gone, "trainers": Prints}
    plan = plan_of(
        tmp_path,
        {"prepare": DONE, "server": UP + SERVER, "trainers": UP + FOREVER},
        QUICK,
        "runtime.hang_timeout_s=1",
    )
    with Progress(plan) as progress:
        outcome, _ = supervise.supervise(
            plan, lambda process, log: up(kinds[process.name](process, log)), progress, []
        )
    assert outcome.why.endswith(
        "; stacks of server cannot be taken: the engine is gone; stacks of trainers are in "
        f"{tmp_path / 'logs/trainers.log'}"
    ), outcome.why
    assert "prepare" not in outcome.why
    assert not (tmp_path / "stacks").exists()


def test_ranks_in_a_container_are_signalled_though_another_process_vanishes(tmp_path):
    """Run it on a process table with two unreadable processes, one that is gone, and a rank."""
    rank = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); "
                "print(flush=True); signal.pause()"
            ),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert rank.stdout.readline() == b"\n"
        catches = Path(f"/proc/{rank.pid}/status").read_text()
        for pid in ("1", str(2**22 + 1), str(rank.pid), "2"):
            (tmp_path / pid).mkdir()
            if pid in ("1", "2"):
                (tmp_path / pid / "status").mkdir()
            else:
                (tmp_path / pid / "status").write_text(catches)
        done = subprocess.run(
            [sys.executable, "-c", contained.SIGNAL_RANKS.replace("/proc", str(tmp_path))],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert rank.wait(20) == 7
    finally:
        rank.kill()
        rank.communicate()


def test_what_hangs_is_not_waited_for_as_a_save_is(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "HUNG_GRACE_S", 0.2)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); forever()"
    plan = plan_of(
        tmp_path, {"trainers": deaf}, "runtime.stop_timeout_s=300", "runtime.hang_timeout_s=1"
    )
    with Progress(plan) as progress:
        outcome, restarts = supervise.supervise(plan, LocalProcess, progress, [])
    assert (outcome.status, outcome.process, restarts) == ("hung", "trainers", 0)


def test_a_long_save_is_no_hang(tmp_path):
    save = """
(run / "heartbeat").touch()
(run / "checkpoints/.staging").mkdir(parents=True)
for part in range(15):
    (run / f"checkpoints/.staging/{part}").write_bytes(b"x")
    time.sleep(0.1)
"""
    code, _ = executed(
        plan_of(tmp_path, {"trainers": UP + save + DONE}, QUICK, "runtime.hang_timeout_s=1")
    )
    assert code == 0


def test_generated_tokens_are_progress_and_a_server_without_an_answer_makes_none(tmp_path):
    """A server that answers now and then, always the same, must not pass for one that gets on."""
    server = SERVER.replace(
        "class Handler", "import itertools\ncount = itertools.count()\nclass Handler"
    ).replace(
        "        self.send_response(",
        """        if self.path == "/metrics":
            self.send_response(200 if next(count) % 2 else 500)
            self.end_headers()
            self.wfile.write(b'vllm:generation_tokens_total{engine="0"} 7.0\\n')
            return
        self.send_response(""",
    )
    trainers = "(run / 'heartbeat').touch()\nforever()"
    plan = plan_of(
        tmp_path,
        {"server": UP + server, "trainers": UP + trainers},
        QUICK,
        "runtime.hang_timeout_s=1",
    )
    assert executed(plan)[0] == 5
    growing = server.replace("200 if next(count) % 2 else 500", "200").replace(
        "7.0\\n'", "%d.0\\n' % next(count)"
    )
    slow = "(run / 'heartbeat').touch()\ntime.sleep(1.8)\n"
    plan = plan_of(
        tmp_path / "grows",
        {"server": UP + growing, "trainers": UP + slow + DONE},
        QUICK,
        "runtime.hang_timeout_s=1",
    )
    assert executed(plan)[0] == 0
