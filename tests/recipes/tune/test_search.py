"""Test recipes/tune/search.py: proposals, pruning, failures, and resuming after a kill."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context

import pytest
from omegaconf import OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import read_metrics
from recipes.bench.benchmark import Table
from recipes.rank import program
from recipes.rank.program import Interrupted
from recipes.tune.search import PRUNED, SearchConfig, search

TABLE = Table("test", "setting speed", figure="speed")


def settings(num_trials=12, **space):
    return SearchConfig("", num_trials=num_trials, space=space or {"a": [1, 2, 3], "b": ["x"]})


def run(folder, args, measure):
    return search(OmegaConf.create({"run_dir": str(folder)}), args, TABLE, measure)


def speed_of(point):
    return 100.0 + 10 * point.get("a", 0) + (5 if point.get("b") else 0)


@pytest.mark.parametrize("values", [[[1]], [1, 1], 1])
def test_a_space_that_cannot_be_searched_is_rejected(values):
    with pytest.raises(UserError, match="space.a"):
        settings(a=values)


def test_the_first_trial_is_the_unchanged_recipe_and_no_point_is_repeated(tmp_path):
    seen = []

    def measure(number, point, report):
        seen.append((number, tuple(point.items())))
        return {"speed": speed_of(point)}

    rows = run(tmp_path, settings(), measure)
    assert rows[0]["setting"] == "as it stands"
    assert seen[0] == (0, ())
    assert len({point for _, point in seen}) == len(seen) == len(rows)
    assert len(rows) <= 4 * 2
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(rows) + 1))


def test_pruned_and_failed_trials_are_rows(tmp_path):
    reported = []

    def measure(number, point, report):
        if number == 7:
            raise UserError("no such engine")
        for figure in [10.0 if number == 6 else 100.0] * 3:
            reported.append(number)
            report(figure)
        return {"speed": 100.0}

    rows = run(tmp_path, settings(9, a=[1, 2, 3, 4, 5, 6, 7, 8, 9]), measure)
    errors = {row["trial"]: row["error"] for row in rows if row["error"]}
    assert errors == {6: PRUNED, 7: "no such engine"}
    assert len(rows) == 9
    assert reported.count(6) == 1


def test_an_interrupted_trial_is_not_a_failed_setting(tmp_path, monkeypatch):
    """Repeat a trial that failed after a signal, which may have reached its process too."""
    seen = []

    def measure(number, point, report):
        seen.append(tuple(point.items()))
        if len(seen) == 2:
            monkeypatch.setattr(program, "_stop_requested", True)
            raise UserError("exit code -15")
        return {"speed": speed_of(point)}

    with pytest.raises(Interrupted):
        run(tmp_path, settings(2, a=[1]), measure)
    monkeypatch.setattr(program, "_stop_requested", False)
    assert [row["error"] for row in run(tmp_path, settings(2, a=[1]), measure)] == [None, None]
    assert seen[1] == seen[2] == (("a", 1),)


def test_trials_before_a_damaged_line_are_used(tmp_path):
    measure = lambda number, point, report: {"speed": speed_of(point)}  # noqa: E731
    before = run(tmp_path, settings(3), measure)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    for damaged in ([*lines[:-1], lines[-1][:-20]], [lines[0], b"\xff\n", lines[2]]):
        metrics.write_bytes(b"".join(damaged))
        assert run(tmp_path, settings(3), measure) == before


def test_a_killed_search_does_not_repeat_finished_trials(tmp_path):
    def kill(number, point, report):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"speed": speed_of(point)}

    process = get_context("fork").Process(target=run, args=(tmp_path, settings(), kill))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = [line["setting"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(finished) == 3
    seen = []

    def measure(number, point, report):
        seen.append(number)
        return {"speed": speed_of(point)}

    rows = run(tmp_path, settings(), measure)
    assert [row["setting"] for row in rows[:3]] == finished
    assert seen == list(range(3, len(rows)))
    assert len({row["setting"] for row in rows}) == len(rows)
