"""Test that a search resumes, and its next suggestions."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from launch.schema import Direction, Parameter, Sweep
from launch.study.optuna_study import Search
from launch.study.sweep_report import best, show_end, sweep_json
from launch.study.trials import Trial
from tests.conftest import composed


def sweep(num_trials: int = 4, **parameters: Parameter) -> Sweep:
    rate = Parameter(key="method.args.learning_rate", low=1e-6, high=1e-3, log=True)
    return Sweep(
        name="mine", metric="loss", num_trials=num_trials, space=parameters or {"rate": rate}
    )


def finish(trial: Trial, value: float | None) -> None:
    trial.status, trial.value = "failed" if value is None else "done", value


def resumed(search: Search, of: Sweep | None = None) -> Search:
    """Return a new search from the sweep.json of another."""
    rows = sweep_json(Path("s"), search.sweep, [], search.trials, search.total)["trials"]
    return Search(of or search.sweep, 0, json.loads(json.dumps(rows)))


def test_a_search_that_died_resumes():
    """The unfinished trial comes first with its values; the others do not change."""
    whole, varied = Search(sweep(), 0), []
    for value in (2.0, None, 1.0, 3.0):
        trial = whole.next()
        varied.append(trial.varied)
        finish(trial, value)
    first = Search(sweep(), 0)
    for value in (2.0, None):
        finish(first.next(), value)
    first.trials[1].why = "no memory"
    first.next().status = "running"  # then the sweep dies
    again = resumed(first)
    assert [(t.status, t.value, t.why) for t in again.trials] == [
        ("done", 2.0, None),
        ("failed", None, "no memory"),
        ("interrupted", None, None),
    ]
    for value in (1.0, 3.0):
        finish(again.next(), value)
    assert [trial.varied for trial in again.trials] == varied
    assert again.next() is None
    assert best(sweep(), again.trials).number == 2
    more = resumed(again, sweep(num_trials=5))
    assert (more.next().number, more.next()) == (4, None)


def test_a_search_of_a_version_without_parameters_starts_again():
    rows = [{"number": 0, "varied": ["seed=0"], "status": "done", "value": 1.0}]
    assert Search(sweep(), 0, rows).trials == []


def test_each_point_of_lists_is_tried_once():
    lists = sweep(
        rank=Parameter(key="adapter.rank", values=[4, 8]),
        dora=Parameter(key="adapter.dora", values=[True, False]),
    )
    search = Search(lists, 0)
    finish(search.next(), 1.0)
    search.next()
    again = resumed(search)
    while again.next():
        pass
    assert [trial.varied for trial in again.trials] == [
        [f"adapter.rank={rank}", f"adapter.dora={dora}"]
        for rank in (4, 8)
        for dora in ("true", "false")
    ]


@pytest.mark.parametrize(
    ("direction", "number"), [(Direction.minimize, 1), (Direction.maximize, 0)]
)
def test_the_best_is_a_command_to_paste(tmp_path, direction, number):
    given = sweep()
    given.direction = direction
    trials = [
        Trial(0, ["seed=0"], "done", value=2.0),
        Trial(1, ["data.path='a b'"], "done", value=1.0),
        Trial(2, ["seed=2"], "failed"),
    ]
    found = sweep_json(tmp_path, given, ["hardware=cpu"], trials, 3)["best"]
    assert found["number"] == number
    command = ["python", "launch/run.py", "hardware=cpu", *trials[number].varied]
    assert shlex.split(found["command"]) == command


@pytest.mark.parametrize(("metric", "figure", "said"), [
    (None, "loss", "add sweep.metric=loss."),
    (None, "reward", "add sweep.metric=reward sweep.direction=maximize."),
    ("loss", "loss", "best loss 0.5, trial 1:"),
])  # fmt: skip
def test_a_grid_tells_how_to_select_the_best_trial(tmp_path, capsys, metric, figure, said):
    grid = Sweep(name="none", metric=metric)
    config = dataclasses.replace(composed("hardware=cpu"), sweep=grid)
    trials = [Trial(n, [f"seed={n}"], "done", figure, 1.0 - n / 2) for n in range(2)]
    show_end(config, sweep_json(tmp_path, grid, [], trials, 2), 0)
    assert said in capsys.readouterr().out
    show_end(config, sweep_json(tmp_path, grid, [], trials[:1], 2), 0)
    assert "add sweep.metric=" not in capsys.readouterr().out
