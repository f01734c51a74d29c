"""Build the page of a sweep: best trial, all trials, parameter importance, curves of the trials."""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.core import json_files
from launch.core.errors import UserError
from launch.plan import rundir
from launch.reports import many, series, tables
from launch.reports.curves import Chart, Charts, curve
from launch.reports.data import Run, dig, is_number, kind_of, listed, objects, phases_of, read
from launch.reports.parts import (
    Block,
    Cell,
    Figure,
    Figures,
    Note,
    Page,
    Pre,
    Table,
    cell,
    filled,
    mark_of,
    number,
    percent,
)
from launch.study.optuna_study import JOURNAL
from launch.study.sweep_report import less_is_better, metric_of, short

MOST_CURVES = 16  # trials that share axes: the best ones
MOST_SIDE_BY_SIDE = 4  # trials of a benchmark side by side, two columns each
FEWEST_OF_A_SEARCH = 10  # finished trials that PED-ANOVA needs, since it uses the best tenth
Trial = dict[str, Any]


def page(folder: Path) -> Page:
    """Return the page of a sweep. Raises UserError for a sweep.json that cannot be read."""
    content = json_files.read_json(folder / "sweep.json")
    if content is None or not isinstance(content.get("trials"), list):
        raise UserError(f"{folder / 'sweep.json'} is damaged. The same sweep command restores it.")
    trials = [{**t, "varied": listed(t.get("varied"))} for t in objects(content["trials"])]
    # None if the trials of a grid report different metrics, which cannot be compared.
    metric = metric_of({**content, "trials": trials})
    is_minimized = (
        content.get("direction") == "minimize" if content.get("metric") else less_is_better(metric)
    )
    valued = [t for t in trials if is_number(t.get("value"))]
    is_mixed = metric is None and bool(valued)
    ranked = (
        trials if is_mixed else sorted(valued, key=lambda t: t["value"], reverse=not is_minimized)
    )
    best = ranked[0] if ranked and not is_mixed else None
    status = _status(folder, trials)
    runs = _runs(folder, (ranked or trials)[:MOST_CURVES])
    blocks: list[Block] = [Figures(_figures(content, trials, status, metric, best))]
    if status == "running":
        blocks.append(Note("Still running: this page shows its state so far."))
    if is_mixed:
        blocks.append(Note("The trials have different figures, so none is the best."))
    elif best is None:
        blocks.append(Note("No trial has a figure yet, so none is the best.", "warn"))
    else:
        if not content.get("metric"):
            better = "lower" if is_minimized else "higher"
            blocks.append(
                Note(f"The sweep sets no metric. Compared by {metric}; {better} is better.")
            )
        command = dig(content, "best", "command") or " ".join(map(str, best["varied"]))
        blocks.append(Pre(f"The best trial, {best.get('number')}", str(command)))
    sections: dict[str, Sequence[Block]] = {
        "Summary": blocks,
        "Trials": [_table(trials, metric, best)],
        "Importance of the parameters": [] if is_mixed else [_importance(folder, trials, metric)],
        "Benchmarks": _benchmarks(runs, len(trials), metric),
        "Curves": _curves(runs, trials, metric),
        "Failed trials": [
            Pre(f"Trial {t.get('number')}", str(t["why"]))
            for t in trials
            if t.get("status") == "failed" and t.get("why")
        ],
    }
    return Page(str(content.get("name") or folder.name), "sweep", status, filled(sections))


def _status(folder: Path, trials: list[Trial]) -> str:
    if rundir.is_locked(folder):
        return "running"
    statuses = {str(t.get("status")) for t in trials}
    if statuses == {"done"}:
        return "done"
    return "failed" if "failed" in statuses else "interrupted"


def _figures(
    content: Trial, trials: list[Trial], status: str, metric: str | None, best: Trial | None
) -> list[Figure]:
    counts = Counter(str(t.get("status")) for t in trials)
    under = ", ".join(f"{n} {s}" for s, n in counts.items())
    under = f"of {content.get('num_trials')}: {under}"
    figures = [Figure("trials", number(len(trials)), under, mark_of(status))]
    if best is not None:
        trial = f"trial {best.get('number')}"
        figures.append(Figure(f"best {metric}", number(best["value"]), trial, "good"))
    return figures


def parameters(trial: Trial) -> dict[str, str]:
    """Return the values of the trial's own overrides by key."""
    pairs = (str(o).lstrip("+~").partition("=") for o in trial["varied"])
    return {key: value for key, _, value in pairs}


def _table(trials: list[Trial], metric: str | None, best: Trial | None) -> Table:
    keys = list(dict.fromkeys(key for trial in trials for key in parameters(trial)))
    rows = []
    for trial in trials:
        values, value, status = parameters(trial), trial.get("value"), str(trial.get("status"))
        figure = cell(value)
        if not metric and is_number(value):
            figure = Cell(f"{number(value)} {trial.get('metric')}")
        rows.append(
            [
                f"{trial.get('number')}" + (" (best)" if trial is best else ""),
                *(_value(values.get(key, "")) for key in keys),
                figure,
                Cell(status, mark=mark_of(status)),
                Path(str(trial.get("run_dir") or "")).name,
            ]
        )
    titles = [key.removeprefix("method.args.") for key in keys]
    columns = ["trial", *titles, metric or "figure", "status", "run"]
    return Table("Trials", columns, rows, ["best" if t is best else "" for t in trials])


def _value(value: str) -> Cell:
    try:
        return cell(float(value))
    except ValueError:
        return Cell(value)


def _importance(folder: Path, trials: list[Trial], metric: str | None) -> Block:
    """Return a table of each parameter's importance, or a note on why it is unknown.

    For a search it is Optuna's PED-ANOVA; for a grid, the variance between means.
    """
    done = [t for t in trials if t.get("status") == "done" and is_number(t.get("value"))]
    varied = varying(done)
    if not varied:
        return Note("Unknown: no parameter has two values among the trials that are done.")
    if len(varied) == 1:
        return Note(f"{varied[0]} is the only parameter that varies: all but chance is due to it.")
    if len({t["value"] for t in done}) == 1:
        return Note(f"Unknown: {metric} is the same in all trials.")
    is_search = (folder / JOURNAL).is_file()
    if is_search and len(done) < FEWEST_OF_A_SEARCH:
        return Note(
            f"Unknown: {len(done)} trials are done, and a search needs {FEWEST_OF_A_SEARCH}."
        )
    if is_search:
        shares = of_search(folder)
        how = (
            f"PED-ANOVA (Optuna) over {len(done)} trials that are done: "
            "what distinguishes the best tenth from the others."
        )
    else:
        shares = of_grid(done)
        how = (
            f"Share of the variance of {metric} that lies between the means of a parameter's "
            f"values, over {len(done)} trials that are done. (Optuna's own estimate is for "
            "searches: it looks at the best tenth, which is one or two trials of a grid.)"
        )
    rows = [[key, Cell(percent(share), number=True, share=share)] for key, share in shares.items()]
    caption = f"How much of {metric} each parameter decides"
    return Table(caption, ["parameter", "share"], rows, note=how)


def varying(trials: list[Trial]) -> list[str]:
    """Return the parameters with more than one value."""
    keys = dict.fromkeys(key for trial in trials for key in parameters(trial))
    return [key for key in keys if len({parameters(t).get(key) for t in trials}) > 1]


def of_grid(done: list[Trial]) -> dict[str, float]:
    """Return each parameter's share of the variance, largest first, then the unexplained rest."""
    values = [float(t["value"]) for t in done]
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    shares = {}
    for key in varying(done):
        groups: dict[str | None, list[float]] = {}
        for trial in done:
            groups.setdefault(parameters(trial).get(key), []).append(float(trial["value"]))
        between = sum(len(g) * (statistics.fmean(g) - mean) ** 2 for g in groups.values())
        shares[key] = between / total
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return {**ordered, "together, and chance": max(0.0, 1 - sum(shares.values()))}


def of_search(folder: Path) -> dict[str, float]:
    """Return each parameter's share by Optuna's PED-ANOVA of the journal, largest first."""
    import optuna  # 0.3 s, only for the page of a search
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Optuna locks the journal to read it. Read a copy instead, without an unfinished last line.
    content = (folder / JOURNAL).read_bytes()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / JOURNAL
        copy.write_bytes(content[: content.rfind(b"\n") + 1])
        storage = JournalStorage(JournalFileBackend(str(copy)))
        study = optuna.load_study(study_name=None, storage=storage)
        return dict(optuna.importance.get_param_importances(study))


def _runs(folder: Path, trials: Sequence[Trial]) -> list[Run]:
    """Read the trials' runs, except deleted ones. For a pipeline, read the last phase with metrics.

    Each run is named by its trial's number and overrides.
    """
    runs = []
    for trial in trials:
        if not trial.get("run_dir"):
            continue
        recorded = Path(str(trial["run_dir"]))
        # The folder of runs may have been moved, so look next to the sweep first.
        moved = folder.parent.parent / Path(*recorded.parts[-2:])
        for run_dir in (moved, recorded):
            try:
                kind = kind_of(run_dir)
            except UserError:  # it is missing, or failed before it wrote a file
                continue
            if kind == "pipeline":
                phases = [p for p in phases_of(run_dir) if (p / "metrics.jsonl").is_file()]
                run_dir = [run_dir, *phases][-1]
            runs.append(
                read(run_dir, f"{trial.get('number')}: {short(list(map(str, trial['varied'])))}")
            )
            break
    return runs


def _left_out(num_shown: int, total: int, metric: str | None) -> str:
    return (
        f"The {num_shown} {'best' if metric else 'first'} of {total} trials."
        if total > num_shown
        else ""
    )


def _curves(runs: list[Run], trials: list[Trial], metric: str | None) -> list[Block]:
    charts = [*_scatter(trials, metric), *series.together(runs)]
    blocks: list[Block] = [Charts(charts, _left_out(len(runs), len(trials), metric))]
    if not charts and not any(map(tables.rows_of, runs)):
        blocks.append(Note("No trial has logged a curve.", "warn"))
    return blocks + [Note(f"{run.name}: {note}", "warn") for run in runs for note in run.notes]


def _benchmarks(runs: list[Run], total: int, metric: str | None) -> list[Block]:
    """Compare the rows of the best trials."""
    shown = runs[:MOST_SIDE_BY_SIDE]
    compared = many.benchmarks(shown)
    left_out = _left_out(len(shown), total, metric)
    return [*compared, *([Note(left_out)] if compared and left_out else [])]


def _scatter(trials: list[Trial], metric: str | None) -> list[Chart]:
    """Return a chart of the metric by trial number, or [] without two comparable trials."""
    points = [
        (float(t["number"]), float(t["value"]))
        for t in trials
        if is_number(t.get("value")) and is_number(t.get("number"))
    ]
    if len(points) < 2 or metric is None:
        return []
    title = f"{metric} of each trial"
    return [Chart(title, [curve(title, points, dots=True)], x_title="trial")]
