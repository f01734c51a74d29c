"""Test real process groups, which run scripts of tests/helpers/supervised.py."""

from __future__ import annotations

import dataclasses
import json

import pytest

from launch.core.errors import HostError
from launch.machine import placement
from tests.helpers.supervised import (
    DONE,
    FOREVER,
    QUICK,
    SAVES,
    SERVER,
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
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def dies_once_trained(end: str) -> str:
    """Return a server that runs `end` after training has begun."""
    dies = f"""
import threading
def watch():
    while "trains" not in (run / "order").read_text():
        time.sleep(0.01)
    {end}
threading.Thread(target=watch, daemon=True).start()
"""
    return SERVER.replace("http.server.HTTPServer(", dies + "http.server.HTTPServer(")


pytestmark = pytest.mark.usefixtures("quick_supervision")


# ---- Success


def once(line: str) -> str:
    """Wait until another process has noted `line`."""
    order = "(run / 'order').read_text() if (run / 'order').exists() else ''"
    return f"\nwhile {line!r} not in ({order}): time.sleep(0.01)\n"


def test_ranks_load_in_parallel_with_their_server_which_ends_last(tmp_path, capfd):
    prepare = "note('prepares'); write('result.json', status='prepared'); print('[bold]done')"
    trainers = (
        "note('ranks load'); assert not (run / 'result.json').exists()"
        f"{once('server listens')}{DONE}"
    )
    server = (
        "signal.signal(signal.SIGTERM, lambda *_: (note('server ends'), sys.exit(0)))"
        + once("ranks load")
        + SERVER
    )
    plan = plan_of(tmp_path, {"prepare": prepare, "server": server, "trainers": trainers}, QUICK)
    code, record = executed(plan)
    assert (code, record["status"], record["restarts"]) == (0, "done", 0)
    order = (tmp_path / "order").read_text().splitlines()
    assert order == ["prepares", "ranks load", "server listens", "server ends"]
    assert "prepare | [bold]done" in capfd.readouterr().err


def test_a_server_on_the_gpu_of_its_ranks_loads_before_them(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "shares_gpu", lambda config: True)
    scripts = {"server": SERVER, "trainers": f"note('ranks load'); {DONE}"}
    assert executed(plan_of(tmp_path, scripts, QUICK))[0] == 0
    assert (tmp_path / "order").read_text().splitlines() == ["server listens", "ranks load"]


def test_a_result_of_an_earlier_attempt_is_removed(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"status": "done"}))
    (tmp_path / "failures").mkdir()
    failure = {"rank": 3, "time": 0.0, "error": "old", "exit_code": 2}
    (tmp_path / "failures/rank3.json").write_text(json.dumps(failure))
    code, record = executed(plan_of(tmp_path, {"trainers": "pass"}, QUICK))
    assert (code, record["status"], record["result"]) == (4, "failed", None)


# ---- The first failure


def test_if_the_first_of_three_fails_the_others_never_start(tmp_path, capsys):
    plan = plan_of(
        tmp_path, {"prepare": FAILS, "server": SERVER, "trainers": DONE}, QUICK, "format=json"
    )
    code, record = executed(plan)
    assert (code, record["status"]) == (4, "failed")
    assert not (tmp_path / "order").exists()
    out, err = capsys.readouterr()
    assert out == "", "stdout belongs to JSON"
    assert "prepare failed: ValueError: no" in err
    assert "  | Traceback of mine" in err


def test_a_failing_rank_ends_the_server_and_its_error_is_explained(tmp_path, capsys):
    trainers = "print('torch.OutOfMemoryError: HIP out of memory', flush=True); sys.exit(1)"
    code, _ = executed(plan_of(tmp_path, {"server": SERVER, "trainers": trainers}, QUICK))
    assert code == 4
    assert "This usually means: the GPU's memory is full" in capsys.readouterr().out


@pytest.mark.parametrize(("end", "why"), [
    ("os._exit(0)", "server failed: it exited with code 0"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "server failed: killed by signal 9 (SIGKILL)"),
])  # fmt: skip
def test_trainers_save_when_their_server_ends_and_the_run_fails(tmp_path, capsys, end, why):
    code, record = executed(
        plan_of(tmp_path, {"server": dies_once_trained(end), "trainers": SAVES}, QUICK)
    )
    assert (code, record["status"]) == (4, "failed")
    assert why in capsys.readouterr().out
    assert (tmp_path / "saved").exists()


def test_a_program_that_is_missing_fails_the_run(tmp_path):
    plan = plan_of(tmp_path, {"trainers": DONE}, QUICK)
    process = dataclasses.replace(plan.processes[0], argv=[str(tmp_path / "no-python")])
    with pytest.raises(HostError, match="no-python: No such file"):
        executed(dataclasses.replace(plan, processes=[process]))
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "failed"


# ---- Restarts


def test_restarts_until_it_succeeds_and_records_their_number(tmp_path, capfd):
    plan = plan_of(tmp_path, {"server": SERVER, "trainers": FLAKY}, QUICK, "runtime.max_restarts=3")
    code, record = executed(plan)
    assert (code, record["status"], record["restarts"]) == (0, "done", 2)
    shown = capfd.readouterr().err
    first, _, second = shown.partition("restart 1 of 3")
    assert "restart 2 of 3" in second
    assert "  | try 1\n" in first
    assert "  | try 2\n" in second
    assert "  | try 1\n" not in second, "the last lines of the attempt before appear again"
    assert (tmp_path / "order").read_text().splitlines() == ["server listens"] * 3


@pytest.mark.parametrize(("exit_code", "code", "restarts"), [(1, 4, 2), (2, 2, 0)])
def test_restarts_are_used_up_unless_the_user_made_a_mistake(tmp_path, exit_code, code, restarts):
    fails = FAILS.replace("exit_code=1", f"exit_code={exit_code}")
    plan = plan_of(tmp_path, {"trainers": fails}, QUICK, "runtime.max_restarts=2")
    assert executed(plan)[0] == code
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["exit_code"], record["restarts"]) == (code, restarts)


# ---- Signals


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", ["SIGHUP", "SIGUSR1"])
def test_a_signal_saves(tmp_path, number, capfd):
    """A second signal, such as another Ctrl-C, does not interrupt the save."""
    rank = SAVES.replace('note("trains")', f"os.kill(os.getppid(), signal.{number})").replace(
        "time.sleep(0.3)", "os.kill(os.getppid(), signal.SIGINT); time.sleep(0.3)"
    )
    plan = plan_of(tmp_path, {"server": SERVER, "trainers": rank}, QUICK, "runtime.max_restarts=2")
    code, record = executed(plan)
    assert (code, record["status"], record["restarts"]) == (75, "interrupted", 0)
    assert (tmp_path / "saved").exists()
    assert f"{number}: waiting for trainers" in capfd.readouterr().err


def test_ranks_that_another_process_stopped_are_interrupted(tmp_path):
    rank = SAVES.replace('note("trains")', "os.kill(os.getpid(), signal.SIGTERM)").replace(
        "exit(75)", "exit(1)"
    )
    code, record = executed(plan_of(tmp_path, {"trainers": rank}, QUICK, "runtime.max_restarts=2"))
    assert (code, record["status"], record["restarts"]) == (75, "interrupted", 0)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_timeout(tmp_path):
    deaf = f"{DEAF}os.kill(os.getppid(), signal.SIGTERM)\n{FOREVER}"
    code, _ = executed(plan_of(tmp_path, {"trainers": deaf}, "runtime.stop_timeout_s=1"))
    assert code == 75


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


def test_a_grandchild_in_its_own_session_is_killed(tmp_path):
    """The autouse fixture checks that no process is left."""
    stays = "import time\nwhile True: time.sleep(1)"
    code, _ = executed(plan_of(tmp_path, {"trainers": CHILD.format(stays) + DONE}, QUICK))
    assert code == 0


def test_ranks_finish_their_save_after_torchrun_has_ended(tmp_path):
    """After a second SIGTERM, torchrun ends immediately, but its ranks still save."""
    torchrun = CHILD.format(RANK) + "while not (run / 'trains').exists(): time.sleep(0.02)\n"
    torchrun += (
        "signal.signal(signal.SIGTERM, lambda *_: (child.terminate(), os._exit(1)))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\nforever()"
    )
    code, record = executed(plan_of(tmp_path, {"trainers": torchrun}, QUICK))
    assert (code, record["result"]["status"]) == (75, "interrupted")
    assert (tmp_path / "saved").exists()
