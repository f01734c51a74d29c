"""An evaluation on two gloo ranks ends as one process does, whoever began it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.common import batches
from tests.conftest import ROOT
from tests.e2e.test_raft import Killed, dying
from tests.e2e.test_resume import configure, run

# Five batches; drawn samples, which the seed of each batch decides, of random weights.
ASKED = ["method.args.batch_size=2", "method.args.max_new_tokens=3", "method.args.temperature=1", "method.args.samples_per_prompt=2"]
ASKED += ["data.num_heldout=9"]


def two_ranks(run_dir: Path) -> subprocess.CompletedProcess:
    """As the launcher starts them."""
    config = configure(run_dir, "evaluate", "topology=ddp", "topology.num_gpus=2", *ASKED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    argv = [*torchrun, "-m", "recipes.evaluate", "--config", str(config)]
    return subprocess.run(argv, env=env, cwd=run_dir, capture_output=True, text=True, timeout=300)


def files(run_dir: Path) -> dict[str, int]:
    """Batch -> when its samples were written."""
    return {path.stem: path.stat().st_mtime_ns for path in run_dir.glob("samples/*/*.jsonl")}


def same(run_dir: Path, whole: Path) -> None:
    results = [json.loads((folder / "result.json").read_text()) for folder in (run_dir, whole)]
    assert {**results[0], "time_s": 0} == {**results[1], "time_s": 0}
    assert results[0]["num_samples"] == 18
    assert (run_dir / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """By one process, in one go."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert run(run_dir, "evaluate", *ASKED)[0] == 0
    return run_dir


@pytest.fixture(scope="module")
def taken_over(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """One process was killed while it sampled its third batch, and two ranks have gone on; with the files that it had left."""
    run_dir = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches.Store, "put", dying(batches.Store.put, 5))
        with pytest.raises(Killed):
            run(run_dir, "evaluate", *ASKED)
    left = files(run_dir)
    done = two_ranks(run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, left


def test_two_ranks_go_on_from_one_and_end_the_same(taken_over, whole):
    run_dir, left = taken_over
    assert sorted(left) == ["000000", "000001"]
    found = files(run_dir)
    assert sorted(found) == [f"{n:06d}" for n in range(5)]
    assert {name: found[name] for name in left} == left, "no batch is sampled again"
    same(run_dir, whole)


def test_the_lines_are_the_main_ranks(taken_over):
    rows = [json.loads(line) for line in (taken_over[0] / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["num_steps"], row["batch"]) for row in rows] == [(1, 3, 0), (2, 3, 2), (3, 3, 4)]
    assert rows[0]["tokens_per_second"] > 0, "as it was logged by the process that sampled it"
    assert "accuracy" in (taken_over[0] / "logs/rank0.log").read_text()


def test_the_figures_of_the_lines_are_of_all_ranks(taken_over):
    rows, answers = (
        [json.loads(line) for line in (taken_over[0] / name).read_text().splitlines()] for name in ("metrics.jsonl", "samples.jsonl")
    )
    turns = [[a for a in answers if a["problem"] in problems] for problems in (range(4), range(4, 8), range(8, 9))]  # two batches of two
    assert [row["score"] for row in rows] == [pytest.approx(sum(a["score"] for a in turn) / len(turn)) for turn in turns]
    assert [row["unfinished"] for row in rows] == [sum(not a["finished"] for a in turn) for turn in turns]
    assert rows[-1]["accuracy"] == json.loads((taken_over[0] / "result.json").read_text())["accuracy"]


@pytest.mark.parametrize("lost", [["samples/*/000001.jsonl", "verdicts/*/000001.jsonl"], ["verdicts/*/000003.jsonl"]])
def test_one_process_goes_on_from_two_ranks_and_ends_the_same(tmp_path, taken_over, whole, lost):
    """Rank 1 was killed while it sampled its first batch, or scored its second; the main one had none left."""
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
    assert [name for name, time in files(run_dir).items() if before[name] != time] == (["000001"] if "samples" in lost[0] else [])
