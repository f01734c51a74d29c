"""A search that goes on: what its journal keeps, and what is asked for next."""

from __future__ import annotations

import dataclasses
import shlex

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from launch.core.errors import UserError
from launch.schema import Direction, Parameter, Sweep
from launch.study.optuna_study import JOURNAL, Search
from launch.study.sweep_report import as_object, best, show_end
from launch.study.trials import Trial
from tests.conftest import composed


def sweep(num_trials: int = 4, **parameters: Parameter) -> Sweep:
    rate = Parameter(key="method.args.learning_rate", low=1e-6, high=1e-3, log=True)
    return Sweep(
        name="mine", metric="loss", num_trials=num_trials, space=parameters or {"rate": rate}
    )


def finish(search: Search, trial: Trial, value: float | None) -> None:
    trial.status, trial.value = "failed" if value is None else "done", value
    search.tell(trial)


def states(folder) -> list[str]:
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return [
        trial.state.name for trial in optuna.load_study(study_name="mine", storage=storage).trials
    ]


def test_a_search_that_died_goes_on(tmp_path):
    """The trial that ran comes first, with its values; the others are as without the kill."""
    whole, asked = Search(sweep(), 0, tmp_path, keep=False), []
    for value in (2.0, None, 1.0, 3.0):
        trial = whole.next()
        asked.append(trial.varied)
        finish(whole, trial, value)
    first = Search(sweep(), 0, tmp_path)
    for value in (2.0, None):
        finish(first, first.next(), value)
    first.next()  # and here it dies
    assert states(tmp_path) == ["COMPLETE", "FAIL", "RUNNING"]
    row = {"number": 1, "why": "no memory", "exit_code": 4, "run_dir": "there"}
    again = Search(sweep(), 0, tmp_path, [row])
    assert [(trial.status, trial.value, trial.why) for trial in again.known[:2]] == [
        ("done", 2.0, None),
        ("failed", None, "no memory"),
    ]
    for value in (1.0, 3.0):
        finish(again, again.next(), value)
    assert [trial.varied for trial in again.known] == asked
    assert again.next() is None
    assert states(tmp_path) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert best(sweep(), again.known).number == 2


def test_more_trials_go_on_in_the_same_search(tmp_path):
    first = Search(sweep(num_trials=1), 0, tmp_path)
    finish(first, first.next(), 1.0)
    more = Search(sweep(num_trials=2), 0, tmp_path)
    assert more.next().number == 1
    assert more.next() is None


def test_lists_are_tried_whole_and_once(tmp_path):
    given = sweep(
        rank=Parameter(key="adapter.rank", values=[4, 8]),
        dora=Parameter(key="adapter.dora", values=[True, False]),
    )
    search = Search(given, 0, tmp_path)
    finish(search, search.next(), 1.0)
    search.next()
    again = Search(given, 0, tmp_path)
    while again.next():
        pass
    assert [trial.varied for trial in again.known] == [
        [f"adapter.rank={rank}", f"adapter.dora={dora}"]
        for rank in (4, 8)
        for dora in ("true", "false")
    ]


def test_a_preview_writes_nothing_and_tells_what_will_be_asked(tmp_path):
    assert not list(tmp_path.iterdir())
    seen = Search(sweep(), 0, tmp_path, keep=False).next().varied
    assert not list(tmp_path.iterdir())
    search = Search(sweep(), 0, tmp_path)
    assert search.next().varied == seen
    finish(search, search.known[0], 1.0)
    before = (tmp_path / JOURNAL).read_bytes()
    seen = Search(sweep(), 0, tmp_path, keep=False).next().varied
    assert (tmp_path / JOURNAL).read_bytes() == before
    assert search.next().varied == seen


def test_a_journal_cut_off_by_a_kill_is_mended(tmp_path):
    search = Search(sweep(), 0, tmp_path)
    finish(search, search.next(), 1.0)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"op_code": 4, "wor')
    (tmp_path / f"{JOURNAL}.lock").symlink_to(tmp_path / JOURNAL)  # as Optuna's own lock looks
    again = Search(sweep(), 0, tmp_path)
    finish(again, again.next(), 2.0)
    assert states(tmp_path) == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize(
    "parameters", [{}, {"seed": Parameter(key="seed", values=[0, 1])}], ids=["range", "list"]
)
def test_a_kill_while_a_trial_is_written_leaves_none_of_it(tmp_path, parameters):
    """The next search asks for the same values again."""
    first = Search(sweep(**parameters), 0, tmp_path)
    finish(first, first.next(), 1.0)
    varied = first.next().varied
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_text("".join(lines[:-1]) + lines[-1][:20])
    shown = Search(sweep(**parameters), 0, tmp_path, keep=False)
    assert shown.next().varied == varied
    again = Search(sweep(**parameters), 0, tmp_path)
    assert again.next().varied == varied
    finish(again, again.known[1], 2.0)
    statuses = [trial.status for trial in Search(sweep(**parameters), 0, tmp_path).known]
    assert statuses == ["done", "done"]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b"{}", b'{"op_code": 99}'], ids=str)
def test_a_line_that_is_none_of_the_journals_is_named(tmp_path, line):
    search = Search(sweep(), 0, tmp_path)
    finish(search, search.next(), 1.0)
    whole = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_bytes(b"".join([*whole[:2], line + b"\n", *whole[2:], b'{"op_code']))
    for keep in (True, False):
        with pytest.raises(UserError, match=rf"^{tmp_path}/journal\.log: .* Move it away"):
            Search(sweep(), 0, tmp_path, keep=keep)


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
    found = as_object(tmp_path, given, ["hardware=cpu"], trials, 3)["best"]
    assert found["number"] == number
    command = ["python", "launch/run.py", "hardware=cpu", *trials[number].varied]
    assert shlex.split(found["command"]) == command


@pytest.mark.parametrize(("metric", "figure", "said"), [
    (None, "loss", "add sweep.metric=loss."),
    (None, "reward", "add sweep.metric=reward sweep.direction=maximize."),
    ("loss", "loss", "best loss 0.5, trial 1:"),
])  # fmt: skip
def test_a_grid_without_a_metric_says_how_the_best_is_named(tmp_path, capsys, metric, figure, said):
    grid = Sweep(name="none", metric=metric)
    config = dataclasses.replace(composed("hardware=cpu"), sweep=grid)
    trials = [Trial(n, [f"seed={n}"], "done", figure, 1.0 - n / 2) for n in range(2)]
    show_end(config, as_object(tmp_path, grid, [], trials, 2), 0)
    assert said in capsys.readouterr().out
    show_end(config, as_object(tmp_path, grid, [], trials[:1], 2), 0)
    assert "add sweep.metric=" not in capsys.readouterr().out
