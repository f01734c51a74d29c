"""Test ranks' own logs: how they are written, followed, shown and looked up."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from launch.core import json_files
from launch.execution import supervise
from launch.execution.local import LocalProcess
from launch.execution.progress import Progress
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
SAID = ["python", "native code", "native code's errors", "a child", "the last line"]


# ---- Written


def rank(run_dir, *argv, option="--config", **environ):
    """Run a process with what torchrun gives a rank."""
    command = [sys.executable, "-u", *argv, option, str(run_dir / "config.yaml")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_every_line_of_a_rank_that_is_killed_is_in_its_file(tmp_path):
    done = rank(tmp_path, "-c", SAYS, RANK="3", WORLD_SIZE="8")
    assert (done.stdout, done.stderr) == ("", "")
    said = (tmp_path / "logs/rank3.log").read_text().splitlines()
    assert [line for line in said if line in SAID] == SAID
    assert any("most recent call first" in line for line in said), "faulthandler"
    rank(tmp_path, "-c", SAYS, RANK="3", WORLD_SIZE="8")
    both = (tmp_path / "logs/rank3.log").read_text().splitlines()
    assert [line for line in both if line in SAID] == SAID * 2, (
        "an attempt's lines follow those of the one before"
    )


def test_a_recipe_that_cannot_be_imported_says_so_there(tmp_path):
    """`python -m recipes.<method>`, as torchrun starts it: before the method is looked for."""
    done = rank(tmp_path, "-m", "recipes.nothing", RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert "No module named recipes.nothing" in (tmp_path / "logs/rank1.log").read_text()


@pytest.mark.parametrize(
    ("option", "environ"),
    [
        ("--config", {}),
        ("--config", {"RANK": "0", "WORLD_SIZE": "1"}),
        ("--other", {"RANK": "0", "WORLD_SIZE": "2"}),
    ],
    ids=["no torchrun", "one rank", "no recipe"],
)
def test_anything_else_says_it_where_it_did(tmp_path, option, environ):
    done = rank(tmp_path, "-c", SAYS, option=option, **environ)
    assert [line for line in done.stdout.splitlines() if line in SAID] == [
        line for line in SAID if line != "native code's errors"
    ]
    assert "native code's errors" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_log_that_cannot_be_opened(tmp_path):
    (tmp_path / "logs/rank1.log").mkdir(parents=True)
    done = rank(tmp_path, "-c", SAYS, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 1
    assert (
        f"IsADirectoryError: [Errno 21] Is a directory: {str(tmp_path / 'logs/rank1.log')!r}"
        in done.stderr.replace("PosixPath(", "")
    )


# ---- Followed

# What stands for torchrun and two ranks: each line where it would be.
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
def test_each_line_is_shown_under_its_rank(tmp_path, capfd):
    script = (
        "print('of torchrun', flush=True); says(0, 'the same'); says(1, 'the same', 'and "
        f"[bold]more'); {DONE}"
    )
    assert executed(two_ranks(tmp_path, script))[0] == 0
    said = capfd.readouterr().err.splitlines()
    for line in (
        "rank 0 | the same",
        "rank 1 | the same",
        "rank 1 | and [bold]more",
        "trainers | of torchrun",
    ):
        assert said.count(line) == 1
    assert not [line for line in said if line.startswith("trainers") and "of torchrun" not in line]


@quick
def test_what_the_ranks_said_is_shown_and_torchruns_report_is_not(tmp_path, capfd):
    """A last line that has no end is shown when its process has ended."""
    script = "says(1, 'why'); (run / 'logs/rank0.log').write_text('cut o'); reports(1, 1)"
    assert executed(two_ranks(tmp_path, script))[0] == 4
    shown = [line for line in capfd.readouterr().err.splitlines() if " | " in line]
    assert {"rank 0 | cut o", "rank 1 | why"} <= set(shown)
    assert not [line for line in shown if "torch/distributed" in line]


@quick
def test_lines_of_an_attempt_begin_where_the_one_before_ended(tmp_path, capfd):
    script = """
tries = len((run / "tries").read_text()) if (run / "tries").exists() else 0
(run / "tries").write_text("x" * (tries + 1))
if tries == 0:
    says(1, "HIP out of memory")
    reports(1, 1)
reports(1, -11)
"""
    assert executed(two_ranks(tmp_path, script, "runtime.max_restarts=1"))[0] == 4
    told, shown = capfd.readouterr()
    first, restart, second = shown.partition("restart 1 of 1")
    assert first.count("| HIP out of memory") == 2, "as it came, and among the last lines"
    assert "This usually means: the GPU's memory is full." in first.replace("\n", " ")
    assert restart
    assert "HIP out of memory" not in second + told, "that was the attempt before"
    assert "trainers, rank 1 failed: killed by signal 11 (SIGSEGV)" in told


@quick
def test_what_a_rank_says_as_it_loads_is_progress(tmp_path):
    script = (
        f"for shard in range(15):\n    says(1, f'shard {{shard}} of 15'); time.sleep(0.1)\n{DONE}"
    )
    assert (
        executed(
            two_ranks(tmp_path, "print('up', flush=True)\n" + script, "runtime.hang_timeout_s=1")
        )[0]
        == 0
    )


@quick
def test_of_a_hang_the_first_rank_tells_the_steps_and_stacks_may_be_in_all(tmp_path, capsys):
    class Prints(LocalProcess):
        def dump_stacks(self, folder):
            return None

    script = (
        "print('W of torchrun', flush=True); says(0, 'step 3/9'); says(1, 'a warning'); (run "
        "/ 'heartbeat').touch(); forever()"
    )
    plan = two_ranks(tmp_path, script, "runtime.hang_timeout_s=1")
    with Progress(plan) as progress:
        outcome, _ = supervise.supervise(plan, Prints, progress, [])
    assert outcome.why.endswith(f"; stacks of trainers are in {tmp_path / 'logs/rank*.log'}")
    assert f"Last lines of {tmp_path / 'logs/rank0.log'}:\n  | step 3/9\n" in supervise.describe(
        plan, outcome
    )


@quick
def test_a_rank_that_fails_as_all_save_is_the_one_that_is_shown(tmp_path, capsys):
    script = """
def fails(*_):
    says(1, "no room")
    write("failures/rank1.json", rank=1, time=1.0, error="OSError: no", exit_code=1)
    print("of torchrun", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, fails)
os.kill(os.getppid(), signal.SIGTERM)
forever()
"""
    assert executed(two_ranks(tmp_path, script))[0] == 75
    assert (
        "trainers, rank 1 failed: OSError: no\nLast lines of "
        f"{tmp_path / 'logs/rank1.log'}:\n  | no room\n" in capsys.readouterr().out
    )


# ---- Looked up

REPORTS = (
    "E torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: -9) local_rank: "
    "1 (pid: 7)\n"
)


@pytest.mark.parametrize(
    ("said", "shown", "line"),
    [
        (
            {"rank0": "lost it\n", "rank1": "mine\n", "trainers": "early\n" + REPORTS},
            "rank1",
            "mine",
        ),
        (
            {"rank0": "lost it\n", "rank1": "\n", "trainers": "early\n" + REPORTS},
            "trainers",
            "early",
        ),
        ({"rank0": "lost it\n", "trainers": "early\n" + REPORTS}, "trainers", "early"),
        (
            {"rank0": "zero\n", "rank1": "one\n", "trainers": "no rank is to blame\n"},
            "trainers",
            "no rank is to blame",
        ),
        ({"rank0": "zero\n", "rank1": "one\n"}, "rank0", "zero"),
    ],
    ids=[
        "the rank's own",
        "an empty one",
        "none",
        "which rank is not known",
        "and torchrun said nothing",
    ],
)
def test_the_log_that_is_shown(tmp_path, said, shown, line):
    plan = two_ranks(tmp_path, DONE)
    for name, text in said.items():
        (tmp_path / f"logs/{name}.log").write_text(text)
    assert f"Last lines of {tmp_path / f'logs/{shown}.log'}:\n  | {line}\n" in supervise.describe(
        plan, Outcome("failed", "trainers")
    )


def test_nobody_said_anything(tmp_path):
    told = supervise.describe(two_ranks(tmp_path, DONE), Outcome("failed", "trainers"))
    assert (
        told == f"\ntrainers failed\nLast lines of {tmp_path / 'logs/trainers.log'}:\n  (nothing)\n"
    )


def test_of_a_users_mistake_its_message_is_all_that_is_shown(tmp_path):
    plan = two_ranks(tmp_path, DONE)
    (tmp_path / "logs/rank1.log").write_text(
        "a warning of some library\nConnection closed by peer\nerror: a.jsonl:2: no\n"
    )
    (tmp_path / "failures").mkdir(exist_ok=True)
    json_files.write_json(
        tmp_path / "failures/rank1.json",
        {"rank": 1, "time": 1.0, "error": "a.jsonl:2: no", "exit_code": 2},
    )
    told = supervise.describe(plan, Outcome("failed", "trainers"))
    assert told == (
        "\ntrainers, rank 1 failed: a.jsonl:2: no\nThe whole log is "
        f"{tmp_path / 'logs/rank1.log'}\n"
    )


def test_what_it_means_is_looked_up_in_the_ranks_own_log(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank0.log").write_text("Connection closed by peer\n")
    (tmp_path / "logs/rank1.log").write_text("HSA_STATUS_ERROR_MEMORY_FAULT\n" + "noise\n" * 50)
    (tmp_path / "logs/trainers.log").write_text(REPORTS.replace("-9", "-6"))
    told = supervise.describe(two_ranks(tmp_path, DONE), Outcome("failed", "trainers"))
    assert "trainers, rank 1 failed: killed by signal 6 (SIGABRT)\n" in told
    assert "This usually means: a kernel touched memory that is not its own." in told


def test_ranks_of_another_node_are_counted_on(tmp_path):
    """A report has the number on the node; logs, failures and messages have the run's."""
    plan = planned(*TWO, "topology=fsdp", run_dir=tmp_path)
    there, here = plan.processes
    assert list(supervise.rank_logs(plan, here)) == list(range(8))
    assert list(supervise.rank_logs(plan, there)) == list(range(8, 16))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank9.log").write_text("before\nthis time\n")
    (tmp_path / "logs/trainers-1.log").write_text(REPORTS)
    outcome = Outcome("failed", "trainers-1", began={tmp_path / "logs/rank9.log": len("before\n")})
    told = supervise.describe(plan, outcome)
    assert told.startswith("\ntrainers-1, rank 9 failed: killed by signal 9 (SIGKILL)\n")
    assert f"Last lines of {tmp_path / 'logs/rank9.log'}:\n  | this time\n" in told


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["topology=single"], {"trainers": 0}),
        (["topology=ddp", "topology.num_gpus=1"], {"trainers": 0}),
        (
            ["topology=split", "topology.server_tensor_parallel=2", "method=grpo"],
            {"server": 0, "trainers": 6},
        ),
    ],
    ids=["one", "one of ddp", "a server of two GPUs"],
)
def test_who_has_logs_of_ranks(overrides, found):
    plan = planned("hardware=mi300x", "model=qwen3_4b", "runtime=local", *overrides)
    assert {p.name: len(supervise.rank_logs(plan, p)) for p in plan.processes} == found
