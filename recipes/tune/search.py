"""A search over settings with Optuna, in a run directory: what is finished is in its journal, and a run that was killed goes on.

The first trial is the recipe as it stands: every parameter null. A trial reports a figure after each row that it measures, and is given
up (`pruned`) where it is then behind the median of the trials before.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from omegaconf import DictConfig
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from recipes.bench.series import Row, Table
from recipes.common.errors import UserError
from recipes.common.files import append
from recipes.common.program import Interrupted, say, stop_asked
from recipes.tune.tuning import TuneConfig

JOURNAL = "journal.log"
PRUNED = "pruned: behind the median of the trials before"
BEFORE_PRUNING = 4  # finished trials: a median of fewer says little
SAME_AGAIN = 20  # proposals in a row that were measured already, after which the space counts as searched
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)

Point = dict[str, Any]
Report = Callable[[float], None]  # of a figure; raises Pruned


@dataclass
class SearchConfig(TuneConfig):
    """`space`: values of each parameter that are tried; null, which leaves it as it is, belongs to each. `num_trials`: at most, the
    recipe as it stands included."""

    space: dict[str, list[Any]] = field(default_factory=dict)
    num_trials: int = field(default=30, metadata={"least": 2})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.space = {name: values for name, values in self.space.items() if values}
        for name, values in self.space.items():
            plain = isinstance(values, list) and all(isinstance(value, (bool, int, float, str, type(None))) for value in values)
            if not plain or len(set(map(str, values))) < len(values):
                raise UserError(f"method.args.space.{name}={values}: a list of different numbers or words, as [1,2,4]; [] leaves it out.")
        if not self.space:
            raise UserError("method.args.space: every parameter is left out, so nothing would be searched.")


class Pruned(Exception):
    """The trial is behind; raised by what measures when a report says so."""


def search(config: DictConfig, args: SearchConfig, table: Table, measure: Callable[[int, Point, Report], Row]) -> list[Row]:
    """A row for each finished trial, the recipe as it stands first.

    `measure` takes the trial's number, the point without nulls and what it reports each of its figures to. Its row has the table's
    figure; a UserError is the row's `error`. Raises Interrupted when a signal asked to stop.
    """
    folder = Path(config.run_dir)
    study = _study(folder / JOURNAL, args)
    rows = _finished(study)
    _rewrite(folder / "metrics.jsonl", rows, args.num_trials)
    again = 0
    while len(rows) < min(args.num_trials, combinations(args.space)) and again < SAME_AGAIN:
        if rows and rows[0]["error"]:  # nothing to compare with: the caller says so, before hours go into the others
            break
        if stop_asked():
            raise Interrupted(rows=rows)
        study.sampler = _sampler(args.seed + len(study.trials))
        trial = study.ask({name: optuna.distributions.CategoricalDistribution(_values(args, name)) for name in args.space})
        same = next((row for row in rows if row["point"] == trial.params), None)
        if same is not None:
            again += 1
            study.tell(trial, same.get(table.figure), state=None if same.get(table.figure) else TrialState.FAIL)
            continue
        again = 0
        row = _measured(study, trial, table, measure, len(rows))
        rows.append(row)
        append(folder / "metrics.jsonl", {"step": len(rows), "num_steps": args.num_trials, **row})
        figure = f"{table.figure} {row[table.figure]:,.4g}" if row.get(table.figure) else row["error"]
        say(f"{len(rows)}/{args.num_trials}  {words(trial.params)}  {figure}")
    return rows


def words(point: Mapping[str, Any]) -> str:
    """What a point changes."""
    return " ".join(f"{name}={value}" for name, value in point.items() if value is not None) or "as it stands"


def set_only(point: Mapping[str, Any]) -> Point:
    return {name: value for name, value in point.items() if value is not None}


def reporter(trial: optuna.Trial, prunable: bool) -> Report:
    """Reports the geometric mean of the figures so far: each counts by its ratio, whatever its size."""
    figures: list[float] = []

    def report(figure: float) -> None:
        figures.append(figure)
        trial.report(statistics.geometric_mean(figures), len(figures))
        if prunable and trial.should_prune():
            raise Pruned

    return report


def _measured(study: optuna.Study, trial: optuna.Trial, table: Table, measure: Callable[[int, Point, Report], Row], number: int) -> Row:
    row: Row = {"trial": number, "setting": words(trial.params), "point": trial.params, "error": None}
    state = TrialState.COMPLETE
    try:
        row |= measure(number, set_only(trial.params), reporter(trial, prunable=number > 0))
    except Pruned:
        row["error"], state = PRUNED, TrialState.PRUNED
    except UserError as refused:
        if stop_asked():  # which may be all that failed it: it is not finished, and is tried again
            raise Interrupted() from refused
        row["error"], state = str(refused), TrialState.FAIL
    trial.set_user_attr("row", row)  # before it counts as finished
    study.tell(trial, row[table.figure] if state == TrialState.COMPLETE else None, state=state)
    return row


def _finished(study: optuna.Study) -> list[Row]:
    """The rows of earlier trials. One that ran when its run was killed is tried again."""
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.enqueue_trial(trial.system_attrs.get("fixed_params") or trial.params)  # its parameters come one by one
        study.tell(trial.number, state=TrialState.FAIL)
    rows = [trial.user_attrs["row"] for trial in study.get_trials(states=FINISHED) if "row" in trial.user_attrs]
    if rows:
        say(f"{len(rows)} trials were finished before the interruption")
    return rows


def _rewrite(path: Path, rows: Sequence[Row], num_trials: int) -> None:
    """A kill may have come between the journal and this file."""
    path.unlink(missing_ok=True)
    for step, row in enumerate(rows, 1):
        append(path, {"step": step, "num_steps": num_trials, **row})


def _values(args: SearchConfig, name: str) -> list[Any]:
    return [None, *(value for value in args.space[name] if value is not None)]


def combinations(space: Mapping[str, Sequence[Any]]) -> int:
    return math.prod(len({None, *values}) for values in space.values())


def _study(journal: Path, args: SearchConfig) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a line for each trial is ours
    _mend(journal)
    study = optuna.create_study(
        study_name="tuning",
        storage=JournalStorage(JournalFileBackend(str(journal))),
        direction="maximize",
        pruner=MedianPruner(n_startup_trials=BEFORE_PRUNING, n_warmup_steps=0),
        load_if_exists=True,
    )
    study.enqueue_trial(dict.fromkeys(args.space), skip_if_exists=True)
    return study


def _sampler(seed: int) -> TPESampler:
    """One for each trial: a single one with a seed would propose its first points again after every interruption."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, n_startup_trials=5)


def _mend(journal: Path) -> None:
    """What a kill in the middle of a write leaves: Optuna's lock, for which it would wait, and a line cut off. The launcher holds the
    run's own lock, so nobody else writes."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    content = journal.read_bytes() if journal.exists() else b""
    if content and not content.endswith(b"\n"):
        journal.write_bytes(content[: content.rfind(b"\n") + 1])
