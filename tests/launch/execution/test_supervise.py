"""Test process groups that are really started: scripts of tests/helpers/supervised.py."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from launch.core.errors import HostError
from launch.execution import orphans, supervise
from launch.execution.local import LocalProcess
from launch.execution.progress import Progress
from launch.machine import placement
from tests.conftest import ROOT
from tests.helpers.supervised import (
    DONE,
    FOREVER,
    QUICK,
    SAVES,
    SERVER,
    eventually,
    executed,
    plan_of,
)

FAILS = """
print("Traceback of mine", flush=True)
write("failures/rank0.json", rank=0, time=1.0, error="ValueError: no", exit_code=1)
sys.exit(1)
"""
FLAKY = f"""
with (run / "tries").open("a") as file:
    file.write("x")
tries = len((run / "tries").read_text())
print("try", tries, flush=True)
while not (run / "order").exists() or (run / "order").read_text().count("server listens") < tries:
    time.sleep(0.01)
if tries < 3:
    sys.exit(1)
{DONE}
"""
DIES_ONCE_TRAINED = """
import threading
def watch():
    while "trains" not in (run / "order").read_text():
        time.sleep(0.01)
    {end}
threading.Thread(target=watch, daemon=True).start()
"""

pytestmark = pytest.mark.usefixtures("quick_supervision")


# ---- To the end


def once(line: str) -> str:
    """Wait until another process has noted `line`."""
    return (
        f"\nwhile {line!r} not in ((run / 'order').read_text() if (run / 'order').exists() "
        "else ''): time.sleep(0.01)\n"
    )


def test_ranks_load_while_their_server_does_and_it_ends_last(tmp_path, capfd):
    prepare = (
        "note('prepares'); write('result.json', status='prepared'); print('[bold]prepared[/bold]')"
    )
    trainers = (
        "note('ranks load'); assert not (run / "
        f"'result.json').exists(){once('server listens')}{DONE}"
    )
    server = (
        "signal.signal(signal.SIGTERM, lambda *_: (note('server ends'), sys.exit(0)))"
        + once("ranks load")
        + SERVER
    )
    plan = plan_of(tmp_path, {"prepare": prepare, "server": server, "trainers": trainers}, QUICK)
    code, record = executed(plan)
    assert (code, record["status"], record["restarts"]) == (0, "done", 0)
    assert (tmp_path / "order").read_text().splitlines() == [
        "prepares",
        "ranks load",
        "server listens",
        "server ends",
    ]
    assert "prepare | [bold]prepared[/bold]" in capfd.readouterr().err


def test_a_server_on_the_gpu_of_its_ranks_loads_before_them(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "shares_gpu", lambda config: True)
    code, _ = executed(
        plan_of(tmp_path, {"server": SERVER, "trainers": f"note('ranks load'); {DONE}"}, QUICK)
    )
    assert code == 0
    assert (tmp_path / "order").read_text().splitlines() == ["server listens", "ranks load"]


def test_a_server_that_ends_as_the_trainers_have_finished_did_not_fail(tmp_path):
    """It loses the communicator that it shares with them."""
    trainers = f"{DONE}; os.kill(int((run / 'pid').read_text()), signal.SIGKILL)"
    server = "(run / 'pid').write_text(str(os.getpid()))\n" + SERVER
    plan = plan_of(tmp_path, {"server": server, "trainers": trainers}, QUICK)
    group = [
        supervise.Group(p, LocalProcess(p, tmp_path / "logs" / p.name), {})
        for p in plan.processes[:1]
    ]
    attempt = supervise.Attempt(plan, Progress(plan), [], group)
    assert eventually(lambda: (tmp_path / "order").exists())
    group.append(
        supervise.Group(
            plan.processes[1], LocalProcess(plan.processes[1], tmp_path / "logs/trainers"), {}
        )
    )
    assert eventually(lambda: all(g.started.poll() is not None for g in group))
    assert attempt._first_failure() is None
    for g in group:
        g.started.remove()


def test_a_server_that_ends_before_it_was_seen_to_answer_is_not_waited_for(tmp_path):
    """The trainers have finished; nothing is left that could answer."""
    server = "while not (run / 'result.json').exists(): time.sleep(0.01)\n"
    code, _ = executed(plan_of(tmp_path, {"server": server, "trainers": DONE}, QUICK))
    assert code == 0


def test_a_result_of_an_earlier_attempt_is_none_of_this_one(tmp_path, capsys):
    (tmp_path / "result.json").write_text(json.dumps({"status": "done"}))
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures/rank3.json").write_text(
        json.dumps({"rank": 3, "time": 0.0, "error": "old", "exit_code": 2})
    )
    code, record = executed(plan_of(tmp_path, {"trainers": "pass"}, QUICK))
    assert (code, record["status"], record["result"]) == (4, "failed", None)
    assert "trainers failed: it ended and left no result" in capsys.readouterr().out


# ---- The first failure


def test_the_first_of_three_fails_and_the_others_never_start(tmp_path, capsys):
    plan = plan_of(tmp_path, {"prepare": FAILS, "server": SERVER, "trainers": DONE}, QUICK)
    code, record = executed(plan)
    assert (code, record["status"]) == (4, "failed")
    said = capsys.readouterr().out
    assert "prepare failed: ValueError: no" in said
    assert "  | Traceback of mine" in said
    assert not (tmp_path / "order").exists()


def test_a_failure_leaves_stdout_to_json(tmp_path, capsys):
    code, _ = executed(plan_of(tmp_path, {"trainers": FAILS}, "format=json", QUICK))
    said = capsys.readouterr()
    assert (code, said.out) == (4, "")
    assert "trainers failed: ValueError: no" in said.err


def test_a_failing_rank_ends_the_server(tmp_path, capsys):
    trainers = (
        "print('torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB', "
        "flush=True); sys.exit(1)"
    )
    code, _ = executed(plan_of(tmp_path, {"server": SERVER, "trainers": trainers}, QUICK))
    assert code == 4
    said = capsys.readouterr().out
    assert "trainers failed\nLast lines of" in said
    assert "This usually means: the GPU's memory is full." in said


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("os._exit(0)", "server failed: it ended by itself"),
        ("os._exit(3)", "server failed\nLast lines of"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "server failed: killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_server_that_ends_early_while_a_trainer_waits(tmp_path, capsys, end, why):
    server = SERVER.replace(
        "http.server.HTTPServer(", DIES_ONCE_TRAINED.format(end=end) + "http.server.HTTPServer("
    )
    code, record = executed(plan_of(tmp_path, {"server": server, "trainers": SAVES}, QUICK))
    assert (code, record["status"]) == (4, "failed"), (
        "the trainers saved, and the run failed all the same"
    )
    assert why in capsys.readouterr().out
    assert (tmp_path / "saved").exists()


def test_a_server_that_is_another(tmp_path):
    plan = plan_of(
        tmp_path, {"server": SERVER.replace("float32", "float16"), "trainers": FOREVER}, QUICK
    )
    with pytest.raises(HostError, match="dtype float16"):
        executed(plan)
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], record["exit_code"]) == ("failed", 3)


def test_a_program_that_is_not_there(tmp_path):
    plan = plan_of(tmp_path, {"trainers": DONE}, QUICK)
    process = dataclasses.replace(plan.processes[0], argv=[str(tmp_path / "no-python")])
    with pytest.raises(HostError, match="no-python: No such file"):
        executed(dataclasses.replace(plan, processes=[process]))
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "failed"


# ---- Again


def test_restarts_until_it_works_and_the_record_says_how_many(tmp_path, capfd):
    code, record = executed(
        plan_of(tmp_path, {"server": SERVER, "trainers": FLAKY}, QUICK, "runtime.max_restarts=3")
    )
    assert (code, record["status"], record["restarts"]) == (0, "done", 2)
    told = capfd.readouterr().err
    assert "restart 1 of 3, from the newest whole checkpoint" in told
    assert "restart 2 of 3" in told
    assert "  | try 1\n" in told
    second = told[told.index("restart 1 of 3") :]
    assert "  | try 2\n" in second
    assert "  | try 1\n" not in second, "the last lines of the attempt before are told again"
    assert (tmp_path / "order").read_text().splitlines() == ["server listens"] * 3


def test_restarts_are_used_up(tmp_path, capsys):
    code, record = executed(plan_of(tmp_path, {"trainers": FAILS}, QUICK, "runtime.max_restarts=2"))
    assert (code, record["status"], record["restarts"]) == (4, "failed", 2)
    assert "trainers failed: ValueError: no" in capsys.readouterr().out


def test_a_users_mistake_is_not_tried_again(tmp_path, capsys):
    refuses = FAILS.replace("exit_code=1", "exit_code=2").replace(
        "Traceback of mine", "error: Errno 98"
    )
    code, record = executed(
        plan_of(tmp_path, {"trainers": refuses}, QUICK, "runtime.max_restarts=2")
    )
    assert (code, record["exit_code"], record["restarts"]) == (2, 2, 0)
    assert "This usually means" not in capsys.readouterr().out


def test_a_failure_cut_off_in_the_middle_is_left_out(tmp_path):
    (tmp_path / "failures").mkdir()
    for name, text in {
        "rank0": '{"rank": 0, "ti',
        "rank1": "[]",
        "rank2": '{"rank": 2}',
        "rank4": "",
    }.items():
        (tmp_path / f"failures/{name}.json").write_text(text)
    for rank, when in ((5, 2.0), (6, 1.0)):
        failure = {"rank": rank, "time": when, "error": "e", "exit_code": 1}
        (tmp_path / f"failures/rank{rank}.json").write_text(json.dumps(failure))
    assert [failure["rank"] for failure in supervise.failures(tmp_path)] == [6, 5]
    assert supervise.worth_another(tmp_path)


# ---- Asked to stop


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_saves(tmp_path, number, capfd):
    rank = SAVES.replace('note("trains")', f"os.kill(os.getppid(), signal.{number})")
    code, record = executed(
        plan_of(tmp_path, {"server": SERVER, "trainers": rank}, QUICK, "runtime.max_restarts=2")
    )
    assert (code, record["status"], record["restarts"]) == (75, "interrupted", 0)
    assert (tmp_path / "saved").exists()
    assert f"{number}: waiting for trainers to save and end (at most 5 s" in capfd.readouterr().err


def test_a_second_ctrl_c_leaves_the_save_alone(tmp_path):
    rank = SAVES.replace('note("trains")', "os.kill(os.getppid(), signal.SIGINT)").replace(
        "time.sleep(0.3)", "os.kill(os.getppid(), signal.SIGINT); time.sleep(0.3)"
    )
    code, record = executed(plan_of(tmp_path, {"trainers": rank}, QUICK))
    assert (code, record["status"]) == (75, "interrupted")
    assert (tmp_path / "saved").exists()


def test_ranks_that_somebody_else_told_to_stop(tmp_path):
    rank = SAVES.replace('note("trains")', "os.kill(os.getpid(), signal.SIGTERM)").replace(
        "exit(75)", "exit(1)"
    )
    code, record = executed(plan_of(tmp_path, {"trainers": rank}, QUICK, "runtime.max_restarts=2"))
    assert (code, record["status"], record["restarts"]) == (75, "interrupted", 0)


def test_a_signal_while_the_server_loads(tmp_path):
    server = once("trains") + "os.kill(os.getppid(), signal.SIGTERM)\n" + FOREVER
    code, record = executed(plan_of(tmp_path, {"server": server, "trainers": SAVES}, QUICK))
    assert (code, record["status"]) == (75, "interrupted")
    assert (tmp_path / "saved").exists()


def test_what_ignores_sigterm_is_killed_when_the_time_is_over(tmp_path):
    deaf = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getppid(), signal.SIGTERM)\n"
        + FOREVER
    )
    code, _ = executed(plan_of(tmp_path, {"trainers": deaf}, "runtime.stop_timeout_s=1"))
    assert code == 75


def test_a_server_that_does_not_end_is_not_given_the_time_of_a_save(tmp_path, monkeypatch):
    """A vLLM that is told to end while it loads waits ten minutes for its dead engine."""
    monkeypatch.setattr(supervise, "SERVER_GRACE_S", 0.1)
    deaf = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        + once("trains")
        + "os.kill(os.getppid(), signal.SIGTERM)\n"
        + FOREVER
    )
    began = time.monotonic()
    code, record = executed(
        plan_of(tmp_path, {"server": deaf, "trainers": SAVES}, "runtime.stop_timeout_s=300")
    )
    assert (code, record["status"]) == (75, "interrupted")
    assert time.monotonic() - began < 60
    assert (tmp_path / "saved").exists()


def test_trainers_whose_server_has_failed_end_soon_unless_they_save(tmp_path, monkeypatch):
    """One waits in a collective for ever; one steps, and saves for longer than that."""
    monkeypatch.setattr(supervise, "UNSERVED_GRACE_S", 0.6)
    server = SERVER.replace(
        "http.server.HTTPServer(",
        DIES_ONCE_TRAINED.format(end="os._exit(3)") + "http.server.HTTPServer(",
    )
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('trains')\nforever()"
    began = time.monotonic()
    code, _ = executed(
        plan_of(
            tmp_path / "deaf", {"server": server, "trainers": deaf}, "runtime.stop_timeout_s=300"
        )
    )
    assert code == 4
    assert time.monotonic() - began < 60
    slow = """
time.sleep(0.3)
(run / "heartbeat").touch()
(run / "checkpoints/.staging").mkdir(parents=True)
for part in range(10):
    (run / f"checkpoints/.staging/{part}").write_bytes(b"x")
    time.sleep(0.15)
"""
    code, _ = executed(
        plan_of(
            tmp_path / "saves",
            {"server": server, "trainers": SAVES.replace("time.sleep(0.3)", slow)},
            "runtime.stop_timeout_s=300",
        )
    )
    assert code == 4
    assert (tmp_path / "saves/saved").exists()


CHILD = (
    "child = subprocess.Popen([sys.executable, '-c', {!r}, sys.argv[1]], start_new_session=True)\n"
)
RANK = f"""
import json, os, pathlib, signal, subprocess, sys, time
run = pathlib.Path(sys.argv[1])
(run / "rank").write_text(str(os.getpid()))
def write(name, **content):
    (run / name).write_text(json.dumps(content))
def note(line):
    write("trains")
{SAVES}"""


def test_a_grandchild_in_a_session_of_its_own_is_killed(tmp_path):
    """The autouse fixture sees that nothing is left."""
    stays = "import time\nwhile True: time.sleep(1)"
    code, _ = executed(plan_of(tmp_path, {"trainers": CHILD.format(stays) + DONE}, QUICK))
    assert code == 0


def test_ranks_that_torchrun_leaves_finish_their_save(tmp_path):
    """A torchrun that gets SIGTERM twice ends at once, while its ranks still save."""
    torchrun = CHILD.format(RANK) + "while not (run / 'trains').exists(): time.sleep(0.02)\n"
    torchrun += (
        "signal.signal(signal.SIGTERM, lambda *_: (child.terminate(), os._exit(1)))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\nforever()"
    )
    code, record = executed(plan_of(tmp_path, {"trainers": torchrun}, QUICK))
    assert (code, record["result"]["status"]) == (75, "interrupted")
    assert (tmp_path / "saved").exists()


# ---- The launcher is killed


@pytest.fixture
def launcher(tmp_path):
    children = []

    def start(*arguments: str) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/helpers/supervised.py"), str(tmp_path), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=(tmp_path / "stderr").open("w"),
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def test_a_launcher_that_is_killed_leaves_nothing_and_its_ranks_save(tmp_path, launcher):
    server = SERVER.replace(
        "note(",
        "signal.signal(signal.SIGTERM, lambda *_: (note('server ends'), os._exit(0)))\nnote(",
    )
    torchrun = CHILD.format(RANK) + "child.wait(); forever()"  # it does not pass on SIGTERM
    child = launcher(f"server={server}", f"trainers={torchrun}", "runtime.stop_timeout_s=2")
    assert eventually(lambda: (tmp_path / "trains").exists()), (tmp_path / "stderr").read_text()
    of = f"{orphans._namespace()}:{orphans.identity(child.pid)}"
    assert len(orphans.marked({orphans.LAUNCHER: of})) == 3
    rank = int((tmp_path / "rank").read_text())
    child.kill()
    child.wait()
    os.kill(rank, signal.SIGTERM)
    assert eventually(lambda: orphans.marked({orphans.LAUNCHER: of}) == [])
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "order").read_text().splitlines() == ["server listens", "server ends"], (
        "the server was not asked, or not last"
    )


@pytest.mark.usefixtures("hangups")
def test_a_terminal_that_goes_away(tmp_path):
    """SIGHUP, and nothing can be written any more: the save finishes, and the record says so."""
    ours, theirs = os.openpty()
    argv = [
        sys.executable,
        str(ROOT / "tests/helpers/supervised.py"),
        str(tmp_path),
        f"trainers={SAVES}",
        QUICK,
    ]
    child = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        assert eventually(lambda: (tmp_path / "order").exists())
        os.close(ours)
        child.send_signal(
            signal.SIGHUP
        )  # the kernel sends it where the terminal is the controlling one
        assert child.wait(20) == 75
    finally:
        child.kill()
        child.wait()
    assert (tmp_path / "saved").exists()
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "interrupted"
