"""Build the page of a sweep: best trial, all trials, parameter importance, curves of the trials."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.core import json_files
from launch.core.errors import UserError
from launch.plan import rundir
from launch.reports import key_charts, many, run_page, run_tables
from launch.reports.curves import Chart, Charts, curve
from launch.reports.parts import (
    Block,
    Cell,
    Note,
    Page,
    Pre,
    Table,
    cell,
    filled,
    mark_of,
    number,
    percent_cell,
    table,
)
from launch.reports.run_files import Run, dig, is_number, kind_of, phases_of, read
from launch.study import optuna_study
from launch.study.sweep_report import less_is_better, metric_of, short_overrides

MOST_CURVES = 16  # trials that share axes: the best ones
MOST_SIDE_BY_SIDE = 4  # trials of a benchmark side by side, two columns each
FEWEST_OF_A_SEARCH = 10  # finished trials that PED-ANOVA needs, since it uses the best tenth
Trial = dict[str, Any]


def page(folder: Path) -> Page:
    """Return the page of a sweep. Raises UserError for a sweep.json that cannot be read."""
    content = json_files.read_json(folder / "sweep.json")
    trials: Any = (content or {}).get("trials")
    if content is None or not isinstance(trials, list) or not all(map(_is_trial, trials)):
        raise UserError(f"{folder / 'sweep.json'} is damaged. The same sweep command restores it.")
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
    runs = _runs(folder, (ranked or trials)[:MOST_CURVES])

    def summary() -> list[Block]:
        counts = ", ".join(f"{n} {status}" for status, n in statuses.items())
        figures: list[list[Any]] = [
            ["trials", len(trials), f"of {content.get('num_trials')}: {counts}"]
        ]
        if best is None:
            why = "The trials have different figures" if is_mixed else "No trial has a figure yet"
            return [run_page.headline(status, None, figures), Note(f"{why}, so no trial is best.")]
        better = "lower" if is_minimized else "higher"
        note = f"trial {best['number']}; {better} is better"
        figures.append([f"best {metric}", Cell(number(best["value"]), True, "good"), note])
        command = dig(content, "best", "command") or " ".join(best["varied"])
        best_trial = Pre(f"The best trial, {best['number']}", command)
        return [run_page.headline(status, None, figures), best_trial]

    which = "first" if best is None else "best"

    sections = filled(
        {
            "Summary": summary,
            "Trials": lambda: [_table(trials, metric, best)],
            "Importance of the parameters": lambda: [
                Note("Unknown: the trials have different figures.")
                if is_mixed
                else importance(content, metric)
            ],
            "Benchmarks": lambda: benchmarks(runs, len(trials), which),
            "Curves": lambda: curves(runs, [] if is_mixed else ranked, len(trials), which),
            "Failed trials": lambda: [
                Pre(f"Trial {t['number']}", t["why"])
                for t in trials
                if t["status"] == "failed" and t.get("why")
            ],
        }
    )
    return Page(str(content.get("name") or folder.name), "sweep", status, sections)


def _is_trial(entry: Any) -> bool:
    types = {"number": int, "status": str, "varied": list}
    return isinstance(entry, dict) and all(isinstance(entry.get(k), t) for k, t in types.items())


def curves(runs: list[Run], ranked: list[Trial], total: int, which: str) -> list[Block]:
    """Draw each trial's value, and the curves of the best or first trials (`which`)."""
    points = sorted((float(t["number"]), float(t["value"])) for t in ranked)
    charts = key_charts.shared_charts(runs)
    if len(points) > 1:
        title = f"{ranked[0]['metric']} of each trial"
        charts.insert(0, Chart(title, [curve(title, points, dots=True)], x_title="trial"))
    notes = [Note(f"{run.name}: {note}", "warn") for run in runs for note in run.notes]
    if not charts and not any(map(run_tables.rows_of, runs)):
        notes.append(Note("No trial has logged a curve.", "warn"))
    left_out = f"The {len(runs)} {which} of {total} trials." if total > len(runs) else ""
    return [Charts(charts, left_out), *notes]


def benchmarks(runs: list[Run], total: int, which: str) -> list[Block]:
    """Compare the rows of a few of the best or first trials (`which`)."""
    shown = runs[:MOST_SIDE_BY_SIDE]
    compared = many.benchmarks(shown)
    left_out = Note(f"The {len(shown)} {which} of {total} trials.")
    return [*compared, left_out] if compared and total > len(shown) else [*compared]


def parameters(trial: Trial) -> dict[str, str]:
    """Return the values of the trial's own overrides by key."""
    pairs = (override.lstrip("+~").partition("=") for override in trial["varied"])
    return {key: value for key, _, value in pairs}


def _table(trials: list[Trial], metric: str | None, best: Trial | None) -> Table:
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

    For a search it is Optuna's PED-ANOVA; for a grid, the variance between means.
    """
    done = [t for t in content["trials"] if t["status"] == "done" and is_number(t.get("value"))]
    keys = dict.fromkeys(key for trial in done for key in parameters(trial))
    varying = [key for key in keys if len({parameters(t).get(key) for t in done}) > 1]
    is_search, fewest = all(t.get("params") for t in done), FEWEST_OF_A_SEARCH
    if not varying:
        return Note("Unknown: no parameter has two values among the trials that are done.")
    if len(varying) == 1:
        return Note(
            f"{varying[0]} is the only parameter that varies, so it explains all but chance."
        )
    if len({t["value"] for t in done}) == 1:
        return Note(f"Unknown: {metric} is the same in all trials.")
    if is_search and len(done) < fewest:
        return Note(f"Unknown: {len(done)} trials are done, and a search needs {fewest}.")
    if is_search:
        shares = optuna_study.importances(content)
        how = (
            f"PED-ANOVA (Optuna) over {len(done)} trials that are done: "
            "what distinguishes the best tenth from the others."
        )
    else:
        shares = of_grid(done, varying)
        how = (
            f"Share of the variance of {metric} that lies between the means of a parameter's "
            f"values, over {len(done)} trials that are done. (Optuna's own estimate is for "
            "searches: it looks at the best tenth, which is one or two trials of a grid.)"
        )
    caption = f"How much of {metric} each parameter decides"
    rows = ({"parameter": k, "share": percent_cell(v, bar=True)} for k, v in shares.items())
    return table(caption, rows, how)


def of_grid(done: list[Trial], varying: Sequence[str]) -> dict[str, float]:
    """Return each parameter's share of the variance, largest first, then the unexplained rest."""
    total = statistics.pvariance([trial["value"] for trial in done])
    shares = {}
    for key in varying:
        groups: dict[str | None, list[float]] = {}
        for trial in done:
            groups.setdefault(parameters(trial).get(key), []).append(float(trial["value"]))
        # The variance if every trial had the mean of its group.
        means = [statistics.fmean(group) for group in groups.values() for _ in group]
        shares[key] = statistics.pvariance(means) / total
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return {**ordered, "together, and chance": max(0.0, 1 - sum(shares.values()))}


def _runs(folder: Path, trials: Sequence[Trial]) -> list[Run]:
    """Read the trials' runs, except deleted ones. For a pipeline, read the last phase with metrics.

    Each run is named by its trial's number and overrides.
    """
    runs = []
    for trial in trials:
        recorded = Path(trial.get("run_dir") or "")
        # The folder of runs may have been moved, so look next to the sweep first.
        moved = folder.parent.parent / Path(*recorded.parts[-2:])
        for run_dir in (moved, recorded) if trial.get("run_dir") else ():
            try:
                kind = kind_of(run_dir)
            except UserError:  # it is missing, or failed before it wrote a file
                continue
            if kind == "pipeline":
                phases = [p for p in phases_of(run_dir) if (p / "metrics.jsonl").is_file()]
                run_dir = [run_dir, *phases][-1]
            runs.append(read(run_dir, f"{trial['number']}: {short_overrides(trial['varied'])}"))
            break
    return runs
