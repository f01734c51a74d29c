"""What a page says of a sweep: the best trial, every trial with its parameters, which parameter matters, curves on one axis."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.files import rundir
from launch.reports import many, one, series, tables
from launch.reports.curves import Chart, Charts, Curve
from launch.reports.data import Run, dig, is_number, kind_of, listed, objects, phases_of, read
from launch.reports.parts import Cell, Figure, Figures, Note, Page, Pre, Section, Table, cell, number, percent
from launch.sweeps.report import less_is_better, metric_of, short
from launch.sweeps.study import JOURNAL

MOST_CURVES = 16  # trials on one axis: the best, where there are more
MOST_SIDE_BY_SIDE = 4  # trials of a benchmark, of which each is a column and another for its ratio
FEWEST_OF_A_SEARCH = 10  # done trials, of which PED-ANOVA looks at the best tenth
Trial = dict[str, Any]


def page(folder: Path) -> Page:
    """Raises UserError for a sweep.json that cannot be read."""
    content = rundir.read_json(folder / "sweep.json")
    if content is None or not isinstance(content.get("trials"), list):
        raise UserError(f"{folder / 'sweep.json'}: cannot be read as a sweep's. The same sweep command writes it anew.")
    trials = [{**t, "varied": listed(t.get("varied"))} for t in objects(content["trials"])]
    metric = metric_of({**content, "trials": trials})
    smaller = content.get("direction") == "minimize" if content.get("metric") else less_is_better(metric)
    valued = sorted((t for t in trials if is_number(t.get("value"))), key=lambda t: t["value"] if smaller else -t["value"])
    differ = metric is None and bool(valued)  # unlike figures have no order
    valued = trials if differ else valued
    best = valued[0] if valued and not differ else None
    statuses = [str(t.get("status")) for t in trials]
    status = (
        "running"
        if rundir.is_locked(folder)
        else "done"
        if set(statuses) <= {"done"} and trials
        else "failed"
        if "failed" in statuses
        else "interrupted"
    )
    runs = _runs(folder, valued[:MOST_CURVES] or trials[:MOST_CURVES])
    sections = [
        Section("Summary", _summary(content, statuses, metric, best, status, smaller, differ)),
        Section("Trials", [_table(trials, metric, best)]),
        Section("Importance of the parameters", [] if differ else _importance(folder, trials, metric)),
        Section("Benchmarks", _benchmarks(runs, len(trials), metric)),
        Section("Curves", _curves(runs, len(trials), trials, metric)),
        Section(
            "Failed trials",
            [Pre(f"Trial {t.get('number')}", str(t["why"])) for t in trials if t.get("status") == "failed" and t.get("why")],
        ),
    ]
    name = str(content.get("name") or folder.name)
    return Page(name, "sweep", status, [s for s in sections if s.blocks])


def _summary(
    content: Trial, statuses: list[str], metric: str | None, best: Trial | None, status: str, smaller: bool, differ: bool
) -> list[Any]:
    counts = {s: statuses.count(s) for s in dict.fromkeys(statuses)}
    under = ", ".join(f"{n} {s}" for s, n in counts.items())
    figures = [Figure("trials", number(len(statuses)), f"of {content.get('num_trials')}: {under}", one.mark_of(status))]
    blocks: list[Any] = [Figures(figures)]
    if status == "running":
        blocks.append(Note("Still running: this page shows what there was when it was made."))
    if differ:
        return [*blocks, Note("The trials have different figures, so none is the best.")]
    if best is None:
        return [*blocks, Note("No trial has a figure yet, so none is the best.", "warn")]
    figures.append(Figure(f"best {metric}", number(best["value"]), f"trial {best.get('number')}", "good"))
    varied = [str(o) for o in best["varied"]]
    if not content.get("metric"):
        blocks.append(Note(f"A grid that names no metric: compared by {metric}, {'lower' if smaller else 'higher'} is better."))
    command = dig(content, "best", "command")
    return [*blocks, Pre(f"The best trial, {best.get('number')}", str(command) if command else " ".join(varied))]


def parameters(trial: Trial) -> dict[str, str]:
    """key: value of the overrides that make it this trial."""
    pairs = (str(o).lstrip("+~").partition("=") for o in trial["varied"])
    return {key: value for key, _, value in pairs}


def _table(trials: list[Trial], metric: str | None, best: Trial | None) -> Table:
    keys = list(dict.fromkeys(key for trial in trials for key in parameters(trial)))
    rows, marks = [], []
    for trial in trials:
        given = parameters(trial)
        cells = [_value(given.get(key)) for key in keys]
        status = Cell(str(trial.get("status")), mark=one.mark_of(str(trial.get("status"))))
        name = f"{trial.get('number')}" + (" (best)" if trial is best else "")
        where = Path(str(trial["run_dir"])).name if trial.get("run_dir") else ""
        value = trial.get("value")
        figure = cell(value) if metric or not is_number(value) else Cell(f"{number(value)} {trial.get('metric')}")
        rows.append([Cell(name), *cells, figure, status, Cell(where)])
        marks.append("best" if trial is best else "")
    return Table("Trials", ["trial", *(key.removeprefix("method.args.") for key in keys), metric or "figure", "status", "run"], rows, marks)


def _value(given: str | None) -> Cell:
    try:
        return Cell("" if given is None else number(float(given)), number=given is not None)
    except (ValueError, OverflowError):
        return Cell(str(given))


def _importance(folder: Path, trials: list[Trial], metric: str | None) -> list[Any]:
    """Of a search by PED-ANOVA, Optuna's own; of a grid by its means. A reason in a sentence where it cannot be said."""
    done = [t for t in trials if t.get("status") == "done" and is_number(t.get("value"))]
    varied = varying(done)
    if not varied:
        return [Note("Cannot be said: no parameter has two values among the trials that are done.")]
    if len(varied) == 1:
        return [Note(f"{varied[0]} is the only parameter that varies: all that is not chance is its.")]
    if len({t["value"] for t in done}) == 1:
        return [Note(f"Cannot be said: {metric} is the same in all trials.")]
    is_search = (folder / JOURNAL).is_file()
    if is_search and len(done) < FEWEST_OF_A_SEARCH:
        return [Note(f"Cannot be said of {len(done)} trials: a search needs {FEWEST_OF_A_SEARCH} that are done, fewer follow chance.")]
    found = of_search(folder) if is_search else of_grid(done)
    how = (
        f"PED-ANOVA (Optuna) over {len(done)} trials that are done: what tells the best tenth from the others."
        if is_search
        else f"Share of the variance of {metric} that lies between the means of a parameter's values, over {len(done)} done trials. "
        "(Optuna's own estimate is for searches: it looks at the best tenth, which of a grid is a trial or two.)"
    )
    rows = [[Cell(key), Cell(percent(share), number=True, share=share)] for key, share in found.items()]
    return [Table(f"How much of {metric} each parameter decides", ["parameter", "share"], rows, note=how)]


def varying(trials: list[Trial]) -> list[str]:
    """Parameters with more than one value."""
    keys = dict.fromkeys(key for trial in trials for key in parameters(trial))
    return [key for key in keys if len({parameters(t).get(key) for t in trials}) > 1]


def of_grid(done: list[Trial]) -> dict[str, float]:
    """parameter -> share of the variance, the largest first, then what is left: parameters together, and chance."""
    values = [float(t["value"]) for t in done]
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    found = {}
    for key in varying(done):
        groups: dict[str | None, list[float]] = {}
        for trial in done:
            groups.setdefault(parameters(trial).get(key), []).append(float(trial["value"]))
        found[key] = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in groups.values()) / total
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    return {**ordered, "together, and chance": max(0.0, 1 - sum(found.values()))}


def of_search(folder: Path) -> dict[str, float]:
    """parameter -> share, the largest first, from the journal."""
    import optuna  # 0.3 s, for the page of a search only
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    content = (folder / JOURNAL).read_bytes()
    with tempfile.TemporaryDirectory() as scratch:  # a copy, without a last line that is being written: reading takes a lock
        (Path(scratch) / JOURNAL).write_bytes(content[: content.rfind(b"\n") + 1])
        storage = JournalStorage(JournalFileBackend(str(Path(scratch) / JOURNAL)))
        return dict(optuna.importance.get_param_importances(optuna.load_study(study_name=None, storage=storage)))


def _runs(folder: Path, trials: Sequence[Trial]) -> list[Run]:
    """Of the trials whose directories are here; of a pipeline its last phase."""
    found = []
    for trial in trials:
        at = Path(str(trial.get("run_dir") or ""))
        # Beside the sweep first: the folder of runs may have been moved. Not Path's is_dir, which raises for a name that is too long.
        place = next((p for p in (folder.parent.parent / Path(*at.parts[-2:]), at) if trial.get("run_dir") and os.path.isdir(p)), None)
        if place is None:
            continue
        try:
            kind = kind_of(place)
        except UserError:  # it failed before its run had a file
            continue
        if kind == "pipeline":
            place = ([p for p in phases_of(place) if (p / "metrics.jsonl").is_file()] or [place])[-1]
        found.append(read(place, f"{trial.get('number')}: {short([str(o) for o in trial.get('varied') or []])}"))
    return found


def _curves(runs: list[Run], total: int, trials: list[Trial], metric: str | None) -> list[Any]:
    charts = [chart for chart in series.together(runs) if chart.curves]
    dots = _scatter(trials, metric)
    left_out = f"The {len(runs)} {'best' if metric else 'first'} of {total} trials." if total > len(runs) else ""
    notes = [Note(line, "warn") for run in runs for line in (f"{run.name}: {said}" for said in run.notes)]
    if not dots and not charts and not any(map(tables.rows_of, runs)):
        notes.insert(0, Note("No trial has left a curve.", "warn"))
    return [*([Charts([*dots, *charts], left_out)] if dots or charts else []), *notes]


def _benchmarks(runs: list[Run], total: int, metric: str | None) -> list[Any]:
    """Rows of the best trials side by side."""
    shown = runs[:MOST_SIDE_BY_SIDE]
    found = many.benchmarks(shown)
    said = f"The {len(shown)} {'best' if metric else 'first'} of {total} trials."
    return [*found, *([Note(said)] if found and total > len(shown) else [])]


def _scatter(trials: list[Trial], metric: str | None) -> list[Chart]:
    """The figure of each trial in the order they came."""
    valued = [(float(t["number"]), float(t["value"])) for t in trials if is_number(t.get("value")) and is_number(t.get("number"))]
    if len(valued) < 2 or metric is None:
        return []
    return [
        Chart(
            "trials",
            f"{metric} of each trial",
            [Curve(f"{metric} of each trial", ([n for n, _ in valued], [v for _, v in valued]), dots=True)],
            x_title="trial",
        )
    ]
