"""Test ranks' own logs: how they are written, followed, and shown after a failure."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from launch.core import json_files
from launch.execution import logs, supervise
from launch.execution.local import LocalProcess
from launch.execution.progress_line import Progress
from launch.execution.supervise import Outcome
from tests.conftest import ROOT
from tests.helpers.slurm_examples import TWO, planned
from tests.helpers.supervised import DONE, QUICK, executed, plan_of

SAYS = """
import faulthandler, os, signal, subprocess, sys
import recipes
print("python")
os.write(1, b"native code\\n")
os.write(2, b"native code's errors\\n")
faulthandler.dump_traceback()
subprocess.run(["echo", "a child"])
print("the last line", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
OUTPUT = ["python", "native code", "native code's errors", "a child", "the last line"]


# ---- Written


def rank(run_dir, *argv, option="--config", **environ):
    """Run a process with the variables that torchrun sets for a rank."""
    command = [sys.executable, "-u", *argv, option, str(run_dir / "config.yaml")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_every_line_of_a_rank_that_is_killed_is_in_its_file(tmp_path):
    for attempt in (1, 2):  # the second attempt appends
        done = rank(tmp_path, "-c", SAYS, RANK="3", WORLD_SIZE="8")
        assert (done.stdout, done.stderr) == ("", "")
        lines = (tmp_path / "logs/rank3.log").read_text().splitlines()
        assert [line for line in lines if line in OUTPUT] == OUTPUT * attempt
    assert any("most recent call first" in line for line in lines), "faulthandler"


@pytest.mark.parametrize(
    ("option", "environ"),
    [("--config", {"RANK": "0", "WORLD_SIZE": "1"}), ("--other", {"RANK": "0", "WORLD_SIZE": "2"})],
    ids=["one rank", "no recipe"],
)
def test_other_programs_write_no_rank_log(tmp_path, option, environ):
    done = rank(tmp_path, "-c", SAYS, option=option, **environ)
    assert "native code\n" in done.stdout
    assert "native code's errors" in done.stderr
    assert not (tmp_path / "logs").exists()


# ---- Followed

# A script that writes the lines of torchrun and two ranks to their logs.
RANKS = """
def says(rank, *lines):
    with (run / f"logs/rank{rank}.log").open("a") as file:
        file.writelines(line + "\\n" for line in lines)
def reports(rank, code):
    said = f"failed (exitcode: {code}) local_rank: {rank} (pid: 1)"
    print(f"E torch/distributed/elastic/multiprocessing/api.py:9] {said}", flush=True)
    sys.exit(1)
"""
quick = pytest.mark.usefixtures("quick_supervision")


def two_ranks(run_dir, script, *overrides):
    plan = plan_of(run_dir, {"trainers": RANKS + script}, QUICK, *overrides)
    return dataclasses.replace(
        plan, processes=[dataclasses.replace(plan.processes[0], num_ranks=2)]
    )


@quick
def test_each_line_is_shown_under_its_rank_without_torchruns_report(tmp_path, capfd):
    """An incomplete last line is shown after its process has ended."""
    script = (
        "print('of torchrun', flush=True); says(0, 'the same'); says(1, 'the same', '[bold]more')\n"
        "with (run / 'logs/rank0.log').open('a') as file:\n    file.write('cut o')\n"
        "reports(1, 1)"
    )
    assert executed(two_ranks(tmp_path, script))[0] == 4
    shown = [line for line in capfd.readouterr().err.splitlines() if " | " in line]
    assert sorted(shown) == [
        "rank 0 | cut o",
        "rank 0 | the same",
        "rank 1 | [bold]more",
        "rank 1 | the same",
        "trainers | of torchrun",
    ]


@quick
def test_a_hang_shows_the_first_ranks_log_and_names_all_logs_with_stacks(tmp_path):
    class Prints(LocalProcess):
        def dump_stacks(self, folder):
            return None

    script = (
        "print('W of torchrun', flush=True); says(0, 'step 3/9'); says(1, 'a warning')\n"
        "(run / 'heartbeat').touch(); forever()"
    )
    plan = two_ranks(tmp_path, script, "runtime.hang_timeout_s=1")
    with Progress(plan) as progress:
        outcome, _ = supervise.supervise(plan, Prints, progress, [])
    assert outcome.why.endswith(f"; stacks of trainers are in {tmp_path / 'logs/rank*.log'}")
    assert f"{tmp_path / 'logs/rank0.log'}:\n  | step 3/9\n" in supervise.describe(plan, outcome)


@quick
def test_a_rank_that_fails_while_all_save_is_shown(tmp_path, capsys):
    script = """
def fails(*_):
    says(1, "no room")
    write("failures/rank1.json", rank=1, time=1.0, error="OSError: no", exit_code=1)
    sys.exit(1)
signal.signal(signal.SIGTERM, fails)
os.kill(os.getppid(), signal.SIGTERM)
forever()
"""
    assert executed(two_ranks(tmp_path, script))[0] == 75
    out = capsys.readouterr().out
    assert "trainers, rank 1 failed: OSError: no\n" in out
    assert f"{tmp_path / 'logs/rank1.log'}:\n  | no room\n" in out


# ---- Shown after a failure

REPORT = "E torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: -9) local_rank: 1"
FAILED = Outcome("failed", "trainers")


@pytest.mark.parametrize(
    ("logs", "shown", "line"),
    [
        ({"rank0": "lost it", "rank1": "mine", "trainers": f"early\n{REPORT}"}, "rank1", "mine"),
        ({"rank0": "lost it", "rank1": "", "trainers": f"early\n{REPORT}"}, "trainers", "early"),
        ({"rank0": "zero", "rank1": "one", "trainers": "no rank"}, "trainers", "no rank"),
        ({"rank0": "zero", "rank1": "one"}, "rank0", "zero"),
    ],
    ids=["the rank's own", "its own is empty", "an unknown rank", "nothing from torchrun"],
)
def test_which_log_is_shown(tmp_path, logs, shown, line):
    plan = two_ranks(tmp_path, DONE)
    for name, text in logs.items():
        (tmp_path / f"logs/{name}.log").write_text(text + "\n")
    description = supervise.describe(plan, FAILED)
    assert f"{tmp_path / f'logs/{shown}.log'}:\n  | {line}\n" in description


def test_a_users_mistake_shows_only_its_message(tmp_path):
    plan = two_ranks(tmp_path, DONE)
    assert "  (nothing)\n" in supervise.describe(plan, FAILED)
    (tmp_path / "logs/rank1.log").write_text("a warning\nConnection closed by peer\n")
    failure = {"rank": 1, "time": 1.0, "error": "a.jsonl:2: no", "exit_code": 2}
    json_files.write_json(tmp_path / "failures/rank1.json", failure)
    description = supervise.describe(plan, FAILED)
    assert "trainers, rank 1 failed: a.jsonl:2: no\n" in description
    assert str(tmp_path / "logs/rank1.log") in description
    assert "warning" not in description


def test_ranks_of_another_node_have_global_numbers(tmp_path):
    """Torchrun reports the rank's number on its node."""
    plan = planned(*TWO, "topology=fsdp", run_dir=tmp_path)
    there, here = plan.processes
    assert list(logs.rank_logs(plan, here)) == list(range(8))
    assert list(logs.rank_logs(plan, there)) == list(range(8, 16))
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs/rank9.log"
    log.write_text("before\nthis time\n")
    (tmp_path / "logs/trainers-1.log").write_text(REPORT)
    outcome = Outcome("failed", "trainers-1", log_offsets={log: len("before\n")})
    description = supervise.describe(plan, outcome)
    assert description.startswith("\ntrainers-1, rank 9 failed: killed by signal 9 (SIGKILL)\n")
    assert f"{log}:\n  | this time\n" in description
