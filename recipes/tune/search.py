"""Search over settings with Optuna. metrics.jsonl has the trials, so a killed run can resume.

The first trial is the unchanged recipe: every parameter is null. A trial reports a figure
after each row. It is stopped early (pruned) if the figure is below the median of earlier trials.
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
from optuna.distributions import CategoricalDistribution
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial

from launch.core.errors import UserError
from launch.core.json_files import read_metrics
from recipes.bench.benchmark import Row, Table, write_rows
from recipes.rank.program import Interrupted, say, stop_requested
from recipes.tune.trial import Setting, run
from recipes.tune.tuning import TuneConfig, finish

PRUNED = "pruned: below the median of earlier trials"
BEFORE_PRUNING = 4  # finished trials before pruning, because a median of fewer means little
MAX_REPEATS = 20  # the search ends after this many known points in a row

Point = dict[str, Any]
Report = Callable[[float], None]  # reports a trial's next figure; raises optuna.TrialPruned


@dataclass
class SearchConfig(TuneConfig):
    """Arguments of a search. `space`: the values to try for each parameter.

    Null is always tried too, which leaves a parameter unchanged. `num_trials` includes the
    unchanged recipe. Raise UserError for an invalid `space`.
    """

    space: dict[str, list[Any]] = field(default_factory=dict)
    num_trials: int = field(default=30, metadata={"minimum": 2})

    def __post_init__(self) -> None:
        self.space = {name: values for name, values in self.space.items() if values}
        for name, values in self.space.items():
            is_flat = isinstance(values, list) and not any(
                isinstance(value, (list, dict)) for value in values
            )
            if not is_flat or len(set(map(str, values))) < len(values):
                raise UserError(
                    f"method.args.space.{name}={values}: use a list of distinct numbers or words, "
                    "such as [1,2,4], or [] to skip."
                )


def search(
    config: DictConfig,
    args: SearchConfig,
    table: Table,
    measure: Callable[[int, Point, Report], Row],
) -> list[Row]:
    """Run trials and return a row for each one, first the unchanged recipe.

    `measure` runs one trial. It takes the trial's number, the point without nulls, and a function
    to report figures. It returns a row with the table's figure. Its UserError becomes the row's
    `error`. Raise Interrupted after a signal.
    """
    lines, figure = Path(config.run_dir) / "metrics.jsonl", table.figure
    # Trials after a damaged line repeat, because later ones count on earlier ones.
    rows = [
        {key: value for key, value in line.items() if key not in ("step", "num_steps")}
        for number, line in enumerate(read_metrics(lines))
        if line.get("trial") == number
    ]
    if rows:
        say(f"resuming: {len(rows)} trials were finished before the interruption")
    choices = {name: list(dict.fromkeys([None, *values])) for name, values in args.space.items()}
    space = {name: CategoricalDistribution(values) for name, values in choices.items()}
    study = create_study(rows, figure, space)
    num_trials = min(args.num_trials, math.prod(map(len, choices.values())))
    repeats = 0
    while len(rows) < num_trials and repeats < MAX_REPEATS:
        if rows and rows[0]["error"]:  # without the unchanged recipe, there is no comparison
            break
        if stop_requested():
            raise Interrupted(rows=rows)
        # A new seed for each trial, because a resumed run would repeat the sampler's proposals.
        seed = args.seed + len(study.trials)
        study.sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
        trial = study.ask(space)
        earlier = next((row for row in rows if row["point"] == trial.params), None)
        if earlier is not None:
            repeats += 1
            study.tell(trial, earlier.get(figure), state=state_of(earlier))
            continue
        repeats = 0
        row = run_trial(study, trial, table, measure, len(rows))
        rows.append(row)
        write_rows(lines, rows, args.num_trials)
        outcome = f"{figure} {row[figure]:,.4g}" if row.get(figure) else row["error"]
        say(f"{len(rows)}/{args.num_trials}  {row['setting']}  {outcome}")
    return rows


def without_nulls(point: Mapping[str, Any]) -> Point:
    return {name: value for name, value in point.items() if value is not None}


def run_trial(
    study: optuna.Study,
    trial: optuna.Trial,
    table: Table,
    measure: Callable[[int, Point, Report], Row],
    number: int,
) -> Row:
    """Run one trial, record the outcome in the study, and return the row."""
    params, figures, means = trial.params, list[float](), list[float]()

    def report(figure: float) -> None:
        figures.append(figure)
        # Use the geometric mean, so that each figure's ratio has the same weight.
        means.append(statistics.geometric_mean(figures))
        trial.report(means[-1], len(means))
        if number > 0 and trial.should_prune():
            raise optuna.TrialPruned

    changes = " ".join(f"{name}={value}" for name, value in without_nulls(params).items())
    row: Row = {"trial": number, "setting": changes or "as it stands", "point": params}
    row["error"] = None
    try:
        row |= measure(number, without_nulls(params), report)
    except optuna.TrialPruned:
        row["error"] = PRUNED
    except UserError as error:
        if stop_requested():  # a signal may have caused the failure, so a resumed run tries again
            raise Interrupted() from error
        row["error"] = str(error)
    study.tell(trial, row.get(table.figure), state=state_of(row))
    return {**row, "reported": means}


def state_of(row: Row) -> TrialState:
    if row["error"] == PRUNED:
        return TrialState.PRUNED
    return TrialState.FAIL if row["error"] else TrialState.COMPLETE


def search_bench(
    config: DictConfig,
    args: SearchConfig,
    table: Table,
    setting_of: Callable[[Point], Setting],
    kind: str,
    name_of: Callable[[Row], str],
    unrecorded: Mapping[str, Any] = {},
) -> tuple[Row, Point]:
    """Search with runs of a benchmark as trials.

    A trial's figure is the geometric mean over the benchmark's rows. Its row also has each figure,
    under `<figure>_by_<kind>`, with names by `name_of`. `unrecorded` are arguments of every trial.
    Return result.json's content and the best point.
    """
    figure = table.figure

    def measure(number: int, point: Point, report: Report) -> Row:
        known = 0

        def on_rows(rows: list[Row]) -> bool:
            nonlocal known
            new_rows, known = rows[known:], len(rows)
            for row in new_rows:
                if row["error"]:
                    return True
                report(row[figure])
            return False

        rows = run(config, f"trial{number}", setting_of(point), unrecorded, on_rows=on_rows)
        figures = {name_of(row): row[figure] for row in rows}
        mean = statistics.geometric_mean(figures.values())
        return {figure: mean, f"{figure}_by_{kind}": figures}

    rows = search(config, args, table, measure)
    settings = [setting_of(without_nulls(row["point"])) for row in rows]
    content = finish(config, table, rows, rows[0], settings)
    best = max((row for row in rows if not row["error"]), key=lambda row: row[figure])
    return content, without_nulls(best["point"])


def create_study(
    rows: Sequence[Row], figure: str, space: Mapping[str, CategoricalDistribution]
) -> optuna.Study:
    """Return a study of the finished trials. Without any, it proposes the unchanged recipe."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # `search` prints each trial instead
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    pruner = MedianPruner(n_startup_trials=BEFORE_PRUNING, n_warmup_steps=0)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    for row in rows:
        trial = create_trial(
            state=state_of(row),
            params=row["point"],
            distributions=space,
            value=row.get(figure),
            intermediate_values=dict(enumerate(row["reported"], 1)),
        )
        study.add_trial(trial)
    if not rows:
        study.enqueue_trial(dict.fromkeys(space))
    return study
