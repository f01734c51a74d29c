"""Test when the watchdog ends a run, and which stacks it dumps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.execution import contained, execute, supervise
from launch.execution.local import LocalProcess
from tests.helpers.supervised import DONE, FOREVER, QUICK, SERVER, eventually, executed, plan_of

pytestmark = pytest.mark.usefixtures("quick_supervision", "wait_for_first_line")
UP = "print('up', flush=True)\n"
SOON = (QUICK, "runtime.hang_timeout_s=1")


def wait_for_start(group):
    """Wait until a process has printed or ended, because a slow start is not a hang."""
    eventually(lambda: group.log.stat().st_size or group.poll() is not None)
    return group


@pytest.fixture
def wait_for_first_line(monkeypatch):
    monkeypatch.setattr(
        execute, "LocalProcess", lambda process, log: wait_for_start(LocalProcess(process, log))
    )


def test_a_server_that_logs_the_same_lines_and_never_answers_hangs(tmp_path, capsys):
    server = "while True:\n    print('waiting for the engine (5 s)', flush=True); time.sleep(0.05)"
    code, record = executed(plan_of(tmp_path, {"server": server, "trainers": DONE}, *SOON))
    assert (code, record["status"], record["exit_code"]) == (5, "hung", 5)
    out = capsys.readouterr().out
    assert "server hung: no step, token or loading progress for 1 s" in out
    assert "  | waiting for the engine (5 s)" in out


def test_new_lines_while_loading_and_a_long_save_are_progress(tmp_path):
    server = """
for shard in range(12):
    print(f'shard {shard} of 12', flush=True); time.sleep(0.1)
"""
    save = """
while not (run / "order").exists(): time.sleep(0.01)
(run / "heartbeat").touch()
(run / "checkpoints/.staging").mkdir(parents=True)
for part in range(12):
    (run / f"checkpoints/.staging/{part}").write_bytes(b"x")
    time.sleep(0.1)
"""
    scripts = {"server": server + SERVER, "trainers": UP + save + DONE}
    assert executed(plan_of(tmp_path, scripts, *SOON))[0] == 0


def test_a_hung_rank_dumps_its_stacks_and_is_restarted(tmp_path, capfd):
    rank = f"""{UP}
def stuck_here():
    forever()
if not (run / "before").exists():
    (run / "before").touch()
    os.environ.clear()
    stuck_here()
"""
    plan = plan_of(tmp_path, {"trainers": rank + DONE}, *SOON, "runtime.max_restarts=1")
    code, record = executed(plan)
    assert (code, record["status"], record["restarts"]) == (0, "done", 1)
    (stacks,) = (tmp_path / "stacks").iterdir()
    assert "stuck_here" in stacks.read_text()
    assert f"stacks of trainers are in {tmp_path / 'stacks'}" in capfd.readouterr().err


def test_ranks_in_a_container_are_signalled_if_another_process_ends(tmp_path):
    """The process table has two unreadable processes, one that has ended, and a rank."""
    catches = "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); "
    rank = subprocess.Popen(
        [sys.executable, "-c", catches + "print(flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
    )
    try:
        assert rank.stdout.readline() == b"\n"
        status = Path(f"/proc/{rank.pid}/status").read_text()
        for pid in ("1", str(2**22 + 1), str(rank.pid), "2"):
            (tmp_path / pid).mkdir()
            if pid in ("1", "2"):
                (tmp_path / pid / "status").mkdir()
            else:
                (tmp_path / pid / "status").write_text(status)
        program = contained.SIGNAL_RANKS_PROGRAM.replace("/proc", str(tmp_path))
        subprocess.run([sys.executable, "-c", program], check=True)
        assert rank.wait(20) == 7
    finally:
        rank.kill()
        rank.communicate()


def test_a_hung_rank_is_killed_without_time_to_save(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "HUNG_GRACE_S", 0.2)
    deaf = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{UP}{FOREVER}"
    plan = plan_of(
        tmp_path, {"trainers": deaf}, "runtime.stop_timeout_s=300", "runtime.hang_timeout_s=1"
    )
    assert executed(plan)[0] == 5


METRICS = """        if self.path == "/metrics":
            self.send_response({status})
            self.end_headers()
            self.wfile.write(b'vllm:generation_tokens_total{{engine="0"}} %d.0\\n' % {tokens})
            return
        self.send_response("""


@pytest.mark.parametrize(
    ("status", "tokens", "code"),
    [("200 if next(count) % 2 else 500", 7, 5), ("200", "next(count)", 0)],
    ids=["none", "growing"],
)
def test_generated_tokens_are_progress(tmp_path, status, tokens, code):
    """A server whose counters do not change makes no progress."""
    server = SERVER.replace(
        "class Handler", "import itertools\ncount = itertools.count()\nclass Handler"
    ).replace("        self.send_response(", METRICS.format(status=status, tokens=tokens))
    trainers = f"(run / 'heartbeat').touch()\ntime.sleep(1.8 if {code == 0} else 600)\n"
    scripts = {"server": UP + server, "trainers": UP + trainers + DONE}
    assert executed(plan_of(tmp_path, scripts, *SOON))[0] == code
