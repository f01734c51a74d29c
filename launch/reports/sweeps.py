"""Build the page of a sweep: best trial, all trials, importance of parameters, and curves."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.core import json_files
from launch.core.errors import UserError
from launch.core.json_files import is_number
from launch.plan import rundir
from launch.reports import key_charts, many, run_page, run_tables
from launch.reports.curves import Chart, Charts, curve
from launch.reports.formats import mark_of, number
from launch.reports.parts import (
    Block,
    Cell,
    Note,
    Page,
    Pre,
    Table,
    build_sections,
    cell,
    percent_cell,
    table,
)
from launch.reports.run_files import Run, kind_of, phases_of, read, value_at
from launch.study import optuna_study
from launch.study.sweep_report import less_is_better, metric_of, short_overrides

MAX_CURVES = 16  # trials with curves; the best ones are shown
MAX_BENCHMARKS = 4  # trials in the table of a benchmark, each with two columns
MIN_SEARCH_TRIALS = 10  # finished trials that PED-ANOVA needs, because it uses the best tenth
Trial = dict[str, Any]
TRIAL_TYPES = {"number": int, "status": str, "varied": list}  # keys that every trial has


def page(folder: Path) -> Page:
    """Return the page of a sweep. Raises UserError if sweep.json is damaged."""
    content = json_files.read_json(folder / "sweep.json") or {}
    trials: Any = content.get("trials")
    if not isinstance(trials, list) or not all(
        isinstance(t, dict) and all(isinstance(t.get(k), cls) for k, cls in TRIAL_TYPES.items())
        for t in trials
    ):
        raise UserError(
            f"{folder / 'sweep.json'} is damaged. Use: the same sweep command, which restores it."
        )
    # None if the trials of a grid report different metrics, which cannot be compared.
    metric = metric_of(content)
    is_minimized = (
        content.get("direction") == "minimize" if content.get("metric") else less_is_better(metric)
    )
    ranked = [trial for trial in trials if is_number(trial.get("value"))]
    is_mixed = metric is None and bool(ranked)
    if not is_mixed:
        ranked.sort(key=lambda trial: trial["value"], reverse=not is_minimized)
    best = ranked[0] if ranked and not is_mixed else None
    statuses = Counter(trial["status"] for trial in trials)
    status = "failed" if statuses["failed"] else "interrupted"
    status = "done" if statuses.keys() == {"done"} else status
    status = "running" if rundir.is_locked(folder) else status
    runs = _runs(folder, (ranked or trials)[:MAX_CURVES])

    def summary() -> list[Block]:
        counts = ", ".join(f"{n} {status}" for status, n in statuses.items())
        figures = [["trials", len(trials), f"of {content.get('num_trials')}: {counts}"]]
        if best is None:
            why = "The trials report different metrics" if is_mixed else "No trial has a result yet"
            result: Block = Note(f"{why}, so there is no best trial.")
        else:
            note = f"trial {best['number']}; {'lower' if is_minimized else 'higher'} is better"
            figures.append([f"best {metric}", Cell(number(best["value"]), True, "good"), note])
            command = value_at(content, "best", "command") or " ".join(best["varied"])
            result = Pre(f"Best trial: {best['number']}", command)
        return [run_page.headline(status, None, figures), result]

    order = "first" if best is None else "best"
    sections = build_sections(
        {
            "Summary": summary,
            "Trials": lambda: [trials_table(trials, metric, best)],
            "Importance of the parameters": lambda: [
                Note("Unknown: the trials report different metrics.")
                if is_mixed
                else importance(content, metric)
            ],
            "Benchmarks": lambda: benchmarks(runs, len(trials), order),
            "Curves": lambda: curves(runs, [] if is_mixed else ranked, len(trials), order),
            "Failed trials": lambda: [
                Pre(f"Trial {t['number']}", t["why"])
                for t in trials
                if t["status"] == "failed" and t.get("why")
            ],
        }
    )
    return Page(str(content.get("name") or folder.name), "sweep", status, sections)


def curves(runs: list[Run], ranked: list[Trial], total: int, order: str) -> list[Block]:
    """Return charts of the trials' values and of `runs`, the best or first (`order`) of `total`."""
    points = sorted((float(t["number"]), float(t["value"])) for t in ranked)
    charts = key_charts.shared_charts(runs)
    if len(points) > 1:
        title = f"{ranked[0]['metric']} of each trial"
        charts.insert(0, Chart(title, [curve(title, points, dots=True)], x_title="trial"))
    notes = [Note(f"{run.name}: {note}", "warn") for run in runs for note in run.notes]
    if not charts and not any(map(run_tables.rows_of, runs)):
        notes.append(Note("No trial has logged a curve.", "warn"))
    note = f"Curves of the {order} {len(runs)} of {total} trials." if total > len(runs) else ""
    return [Charts(charts, note), *notes]


def benchmarks(runs: list[Run], total: int, order: str) -> list[Block]:
    """Return tables that compare a few of `runs`, the best or first (`order`) of `total`."""
    compared_runs = runs[:MAX_BENCHMARKS]
    tables = many.benchmarks(compared_runs)
    note = Note(f"The {order} {len(compared_runs)} of {total} trials.")
    return [*tables, note] if tables and total > len(compared_runs) else [*tables]


def parameters(trial: Trial) -> dict[str, str]:
    """Return the values that the sweep set for a trial, by key."""
    pairs = (override.lstrip("+~").partition("=") for override in trial["varied"])
    return {key: value for key, _, value in pairs}


def trials_table(trials: list[Trial], metric: str | None, best: Trial | None) -> Table:
    """Return a table with the parameters, result and status of each trial."""
    keys = dict.fromkeys(key for trial in trials for key in parameters(trial))
    rows = []
    for trial in trials:
        row: dict[str, Any] = {"trial": f"{trial['number']}" + " (best)" * (trial is best)}
        row |= {key.removeprefix("method.args."): parameters(trial).get(key, "") for key in keys}
        value = cell(trial.get("value"))
        if not metric and value.number:
            value = Cell(f"{value.text} {trial.get('metric')}")
        row[metric or "figure"] = value
        row["status"] = Cell(trial["status"], mark=mark_of(trial["status"]))
        rows.append(row | {"run": Path(trial.get("run_dir") or "").name})
    return table("Trials", rows, marks=["best" if t is best else "" for t in trials])


def importance(content: dict[str, Any], metric: str | None) -> Block:
    """Return a table of each parameter's importance, or a note on why it is unknown.

    The importance is Optuna's PED-ANOVA for a search, and a share of the variance for a grid.
    """
    done = [t for t in content["trials"] if t["status"] == "done" and is_number(t.get("value"))]
    keys = dict.fromkeys(key for trial in done for key in parameters(trial))
    varying = [key for key in keys if len({parameters(t).get(key) for t in done}) > 1]
    is_search = all(t.get("params") for t in done)
    if len(varying) < 2 or len({t["value"] for t in done}) == 1:
        return Note(
            "Unknown: it needs trials that differ in several parameters and in their results."
        )
    if is_search and len(done) < MIN_SEARCH_TRIALS:
        return Note(
            f"Unknown: {len(done)} trials are finished, and a search needs {MIN_SEARCH_TRIALS}."
        )
    if is_search:
        shares = optuna_study.importances(content)
        note = (
            f"Optuna's PED-ANOVA over {len(done)} finished trials. A parameter is important if it "
            "distinguishes the best tenth of the trials from the others."
        )
    else:
        shares = variance_shares(done, varying)
        note = (
            f"Variance of {metric} between the means of a parameter's values, as a share of its "
            f"variance over {len(done)} finished trials. Optuna's estimate does not suit a grid, "
            "because it uses the best tenth, which would be one or two trials."
        )
    caption = f"Influence of each parameter on {metric}"
    rows = ({"parameter": k, "share": percent_cell(v, bar=True)} for k, v in shares.items())
    return table(caption, rows, note)


def variance_shares(trials: list[Trial], keys: Sequence[str]) -> dict[str, float]:
    """Return the share of the variance that each parameter explains, largest first.

    The last entry is the rest: interactions of parameters, and chance.
    """
    total = statistics.pvariance([trial["value"] for trial in trials])
    shares = {}
    for key in keys:
        groups: dict[str | None, list[float]] = {}
        for trial in trials:
            groups.setdefault(parameters(trial).get(key), []).append(float(trial["value"]))
        # The variance if every trial had the mean of its group.
        means = [statistics.fmean(group) for group in groups.values() for _ in group]
        shares[key] = statistics.pvariance(means) / total
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return {**ordered, "interactions and chance": max(0.0, 1 - sum(shares.values()))}


def _runs(folder: Path, trials: Sequence[Trial]) -> list[Run]:
    """Return the trials' runs that still exist, named by the trial's number and parameters.

    A pipeline is represented by its last phase with metrics.
    """
    runs = []
    for trial in trials:
        recorded = Path(trial.get("run_dir") or "")
        # The folder of all runs may have been moved, so look next to the sweep first.
        moved = folder.parent.parent / Path(*recorded.parts[-2:])
        for run_dir in (moved, recorded) if trial.get("run_dir") else ():
            try:
                kind = kind_of(run_dir)
            except UserError:  # the run was deleted, or failed before it wrote a file
                continue
            if kind == "pipeline":
                phases = [p for p in phases_of(run_dir) if (p / "metrics.jsonl").is_file()]
                run_dir = [run_dir, *phases][-1]
            runs.append(read(run_dir, f"{trial['number']}: {short_overrides(trial['varied'])}"))
            break
    return runs
