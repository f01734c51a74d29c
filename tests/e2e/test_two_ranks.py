"""Test recipes on two gloo ranks, all in the same two processes.

An evaluation equals that of one process, even if another number of processes began it. A training
that diverges ends on both ranks. Benchmarks of several GPUs measure every row.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.rank import program
from recipes.sampling import batches
from tests.conftest import ROOT
from tests.e2e import phases
from tests.e2e.test_raft import Killed, dying
from tests.e2e.test_resume import configure, run

# Five batches of samples from random weights; each batch has its own seed.
ASKED = """
method.args.batch_size=2 method.args.max_new_tokens=3 method.args.temperature=1
method.args.samples_per_prompt=2 data.num_heldout=9
""".split()
TWO = ["topology=ddp", "topology.num_gpus=2"]
DIVERGES = ["method.args.learning_rate=1e30", "method.args.max_steps=20"]


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> tuple[dict[str, Path], dict[str, int]]:
    """Return the directory of each recipe's run on two ranks, and files of a killed evaluation.

    One process was killed while it sampled the third batch. Two ranks finish the evaluation.
    """
    home = tmp_path_factory.mktemp("two")
    folders = {name: home / name for name in ("evaluate", "sft", "scaling", "finetune")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches.Store, "put", dying(batches.Store.put, 5))
        with pytest.raises(Killed):
            run(folders["evaluate"], "evaluate", *ASKED)
    left = files(folders["evaluate"])
    configs = [
        configure(folders["evaluate"], "evaluate", *TWO, *ASKED),
        configure(folders["sft"], "sft", *TWO, *DIVERGES),
        phases.configure_benchmark(folders["scaling"], "scaling", "topology=ddp"),
        phases.configure_benchmark(
            folders["finetune"], "finetune", "topology=ddp", "model=qwen3_8b"
        ),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.two_ranks", "--config", *map(str, configs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    logs = "".join(log.read_text() for log in sorted(home.glob("*/logs/*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return folders, left


def result_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


def lines_of(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def files(run_dir: Path) -> dict[str, int]:
    """Return the time at which the samples of each batch were written."""
    return {path.stem: path.stat().st_mtime_ns for path in run_dir.glob("samples/*/*.jsonl")}


def same(run_dir: Path, whole: Path) -> None:
    results = [result_of(folder) for folder in (run_dir, whole)]
    assert {**results[0], "time_s": 0} == {**results[1], "time_s": 0}
    assert results[0]["num_samples"] == 18
    assert (run_dir / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return an uninterrupted run of one process."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert run(run_dir, "evaluate", *ASKED)[0] == 0
    return run_dir


@pytest.fixture
def taken_over(together) -> tuple[Path, dict[str, int]]:
    """Return the evaluation that two ranks finished, and the files that its first process left."""
    folders, left = together
    return folders["evaluate"], left


def test_two_ranks_resume_one_and_end_the_same(taken_over, whole):
    run_dir, left = taken_over
    assert sorted(left) == ["000000", "000001"]
    times = files(run_dir)
    assert sorted(times) == [f"{n:06d}" for n in range(5)]
    assert {name: times[name] for name in left} == left, "no batch is sampled again"
    same(run_dir, whole)


def test_the_main_rank_logs_figures_of_all_ranks(taken_over):
    run_dir = taken_over[0]
    rows, answers = lines_of(run_dir), lines_of(run_dir, "samples.jsonl")
    steps = [(row["step"], row["num_steps"], row["batch"]) for row in rows]
    assert steps == [(1, 3, 0), (2, 3, 2), (3, 3, 4)]
    assert rows[0]["tokens_per_second"] > 0, "as it was logged by the process that sampled it"
    assert "accuracy" in (run_dir / "logs/rank0.log").read_text()
    # In each turn, every rank has one batch of two problems.
    problems = (range(4), range(4, 8), range(8, 9))
    for row, numbers in zip(rows, problems, strict=True):
        turn = [answer for answer in answers if answer["problem"] in numbers]
        assert row["score"] == pytest.approx(sum(a["score"] for a in turn) / len(turn))
        assert row["unfinished"] == sum(not a["finished"] for a in turn)
    assert rows[-1]["accuracy"] == result_of(run_dir)["accuracy"]


@pytest.mark.parametrize(
    "lost", [["samples/*/000001.jsonl", "verdicts/*/000001.jsonl"], ["verdicts/*/000003.jsonl"]]
)
def test_one_process_resumes_two_ranks_and_ends_the_same(tmp_path, taken_over, whole, lost):
    """A batch is lost that rank 1 was sampling or scoring; rank 0 had finished."""
    run_dir = tmp_path / "run"
    shutil.copytree(taken_over[0], run_dir)
    before = files(run_dir)
    for pattern in lost:
        (path,) = run_dir.glob(pattern)
        path.unlink()
    for name in ("result.json", "samples.jsonl"):
        (run_dir / name).unlink()
    assert run(run_dir, "evaluate", *ASKED)[0] == 0
    same(run_dir, whole)
    assert [name for name, time in files(run_dir).items() if before[name] != time] == (
        ["000001"] if "samples" in lost[0] else []
    )


def test_a_loss_that_is_not_finite_ends_the_run_on_every_rank(together):
    run_dir = together[0]["sft"]
    result, rows = result_of(run_dir), lines_of(run_dir)
    assert rows[-1]["loss"] is None, "the step is on record"
    assert all(row["loss"] is not None for row in rows[:-1])
    assert len(rows) < 20
    assert (result["status"], result["exit_code"]) == ("failed", program.EXIT_FAILED)
    failures = [json.loads((run_dir / f"failures/rank{n}.json").read_text()) for n in (0, 1)]
    for failure in (result, *failures):
        assert failure["error"].startswith(
            f"the loss of step {rows[-1]['step']} is nan: the training diverged. Lower "
            "method.args.learning_rate (1e+30)"
        )


@pytest.mark.parametrize("name", ["scaling", "finetune"])
def test_a_benchmark_measures_every_row(together, name):
    phases.check_rows(name, 3, result_of(together[0][name]), lines_of(together[0][name]))


def test_scaling_compares_the_same_training_with_different_sharding(together):
    result = result_of(together[0]["scaling"])
    one, ddp, fsdp = result["rows"]
    assert (one["num_gpus"], one["efficiency"]) == (1, 1.0)
    assert ddp["global_batch"] == fsdp["global_batch"] == 2 * one["batch"]
    assert ddp["loss"] == pytest.approx(fsdp["loss"], rel=1e-5)
    [left_out] = [note for note in result["notes"] if "4, 8 GPUs are left out" in note]
    assert left_out.endswith("leave out smoke=true.")
