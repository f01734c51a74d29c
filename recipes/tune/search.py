"""Search over settings with Optuna; a journal holds finished trials, so a killed run resumes.

The first trial is the unchanged recipe, with every parameter null. A trial reports a figure after
each row that it measures, and is stopped (`pruned`) if it is then behind the median of earlier
trials.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import optuna
from omegaconf import DictConfig
from optuna.distributions import CategoricalDistribution
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from launch.core.errors import UserError
from recipes.bench.benchmark import Row, Table
from recipes.rank.files import append
from recipes.rank.program import Interrupted, say, stop_asked
from recipes.tune.trial import Setting, run
from recipes.tune.tuning import TuneConfig, finish

JOURNAL = "journal.log"
PRUNED = "pruned: behind the median of earlier trials"
BEFORE_PRUNING = 4  # finished trials before pruning; a median of fewer means little
MAX_REPEATS = 20  # known proposals in a row that end the search
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)

Point = dict[str, Any]
Report = Callable[[float], None]  # reports a figure; raises optuna.TrialPruned


@dataclass
class SearchConfig(TuneConfig):
    """Hold the arguments of a search. `space`: the values to try for each parameter.

    Null, which leaves a parameter unchanged, is always tried too. `num_trials` includes the
    unchanged recipe.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("",)  # of the names in `space`

    space: dict[str, list[Any]] = field(default_factory=dict)
    num_trials: int = field(default=30, metadata={"least": 2})

    def __post_init__(self) -> None:
        self.space = {name: values for name, values in self.space.items() if values}
        for name, values in self.space.items():
            plain = isinstance(values, list) and not any(
                isinstance(value, (list, dict)) for value in values
            )
            problem = None
            if not name.startswith(self.prefixes):
                problem = f"its name has to start with {', '.join(self.prefixes)}"
            elif not plain or len(set(map(str, values))) < len(values):
                problem = "use a list of different numbers or words, as [1,2,4]; [] leaves it out"
            if problem:
                raise UserError(f"method.args.space.{name}={values}: {problem}.")


def search(
    config: DictConfig,
    args: SearchConfig,
    table: Table,
    measure: Callable[[int, Point, Report], Row],
) -> list[Row]:
    """Return a row for each finished trial, the unchanged recipe first.

    `measure` takes the trial's number, the point without nulls, and a function that reports a
    figure. It returns a row with the table's figure; a UserError becomes the row's `error`. Raise
    Interrupted after a signal.
    """
    folder, figure = Path(config.run_dir), table.figure
    lines = folder / "metrics.jsonl"
    study = open_study(folder / JOURNAL, args)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):  # queue again after a kill
        # `params` may be incomplete, because parameters are recorded one by one.
        study.enqueue_trial(trial.system_attrs.get("fixed_params") or trial.params)
        study.tell(trial.number, state=TrialState.FAIL)
    finished = study.get_trials(states=FINISHED)
    rows = [trial.user_attrs["row"] for trial in finished if "row" in trial.user_attrs]
    if rows:
        say(f"{len(rows)} trials were finished before the interruption")
    lines.unlink(missing_ok=True)  # a killed run may have written to the journal but not here
    for step, row in enumerate(rows, 1):
        append(lines, {"step": step, "num_steps": args.num_trials, **row})
    choices = {name: list(dict.fromkeys([None, *values])) for name, values in args.space.items()}
    space = {name: CategoricalDistribution(values) for name, values in choices.items()}
    most = min(args.num_trials, math.prod(map(len, choices.values())))
    repeats = 0
    while len(rows) < most and repeats < MAX_REPEATS:
        if rows and rows[0]["error"]:  # nothing to compare with
            break
        if stop_asked():
            raise Interrupted(rows=rows)
        # A single seeded sampler would repeat its proposals after a resume.
        seed = args.seed + len(study.trials)
        study.sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
        trial = study.ask(space)
        earlier = next((row for row in rows if row["point"] == trial.params), None)
        if earlier is not None:
            repeats += 1
            state = None if earlier.get(figure) else TrialState.FAIL
            study.tell(trial, earlier.get(figure), state=state)
            continue
        repeats = 0
        row = _measured(study, trial, table, measure, len(rows))
        rows.append(row)
        append(lines, {"step": len(rows), "num_steps": args.num_trials, **row})
        outcome = f"{figure} {row[figure]:,.4g}" if row.get(figure) else row["error"]
        say(f"{len(rows)}/{args.num_trials}  {row['setting']}  {outcome}")
    return rows


def without_nulls(point: Mapping[str, Any]) -> Point:
    return {name: value for name, value in point.items() if value is not None}


def _measured(
    study: optuna.Study,
    trial: optuna.Trial,
    table: Table,
    measure: Callable[[int, Point, Report], Row],
    number: int,
) -> Row:
    params, figures = trial.params, list[float]()

    def report(figure: float) -> None:
        figures.append(figure)
        # The geometric mean, so that equal ratios of figures have equal weight.
        trial.report(statistics.geometric_mean(figures), len(figures))
        if number > 0 and trial.should_prune():
            raise optuna.TrialPruned

    changes = " ".join(f"{name}={value}" for name, value in without_nulls(params).items())
    row: Row = {"trial": number, "setting": changes or "as it stands", "point": params}
    row["error"], state = None, TrialState.COMPLETE
    try:
        row |= measure(number, without_nulls(params), report)
    except optuna.TrialPruned:
        row["error"], state = PRUNED, TrialState.PRUNED
    except UserError as error:
        if stop_asked():  # the signal may have caused the failure, so the trial is repeated later
            raise Interrupted() from error
        row["error"], state = str(error), TrialState.FAIL
    trial.set_user_attr("row", row)  # before `tell`, so that every finished trial has a row
    study.tell(trial, row[table.figure] if state == TrialState.COMPLETE else None, state=state)
    return row


def search_bench(
    config: DictConfig,
    args: SearchConfig,
    table: Table,
    setting_of: Callable[[Point], Setting],
    kind: str,
    name_of: Callable[[Row], str],
    unrecorded: Mapping[str, Any] = {},
) -> tuple[Row, Point]:
    """Search with a benchmark as the trial; return result.json's content and the best point.

    A trial's figure is the geometric mean over the benchmark's rows. Its row also has the figures
    by `kind`, named by `name_of`. `unrecorded` are arguments of every trial.
    """
    figure = table.figure

    def measure(number: int, point: Point, report: Report) -> Row:
        known, pruned = 0, False

        def on_rows(rows: list[Row]) -> bool:
            nonlocal known, pruned
            try:
                for row in rows[known:]:
                    if row["error"]:
                        return True
                    report(row[figure])
            except optuna.TrialPruned:
                pruned = True
            known = len(rows)
            return pruned

        rows = run(config, f"trial{number}", setting_of(point), unrecorded, on_rows=on_rows)
        if pruned:
            raise optuna.TrialPruned
        figures = {name_of(row): row[figure] for row in rows}
        mean = statistics.geometric_mean(figures.values())
        return {figure: mean, f"{figure}_by_{kind}": figures}

    rows = search(config, args, table, measure)
    settings = [setting_of(without_nulls(row["point"])) for row in rows]
    content = finish(config, table, rows, rows[0], settings)
    best = max((row for row in rows if not row["error"]), key=lambda row: row[figure])
    return content, without_nulls(best["point"])


def open_study(journal: Path, args: SearchConfig) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # we print the line for each trial
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    # A kill during a write leaves Optuna's lock and a truncated line. They can be removed, because
    # the launcher holds the run's lock, so no other process writes.
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    content = journal.read_bytes() if journal.exists() else b""
    if not content.endswith(b"\n"):
        journal.write_bytes(content[: content.rfind(b"\n") + 1])
    study = optuna.create_study(
        study_name="tuning",
        storage=JournalStorage(JournalFileBackend(str(journal))),
        direction="maximize",
        pruner=MedianPruner(n_startup_trials=BEFORE_PRUNING, n_warmup_steps=0),
        load_if_exists=True,
    )
    study.enqueue_trial(dict.fromkeys(args.space), skip_if_exists=True)
    return study
