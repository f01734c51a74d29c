"""Build the page of several runs: differences, curves on shared axes, results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.config.request import leaves
from launch.core import json_files
from launch.plan import rundir
from launch.reports import evaluations, key_charts, run_page, run_tables
from launch.reports.curves import Charts
from launch.reports.parts import (
    NONE,
    Block,
    Cell,
    Folded,
    Note,
    Page,
    Section,
    Table,
    duration,
    filled,
    mark_of,
    percent,
    percent_cell,
    ratio,
    table,
    text,
)
from launch.reports.run_files import Run, phases_of, read, status_of
from launch.study import lineage

# Keys for the place of a run rather than its computation: paths of a phase, output.
NOT_COMPARED = {"name", "run_root", "mode", "format", "verbose", "resume", "chosen", "speed_keeps"}
RECORDED = ("code", "image", "packages", "host")
MOST_DETAILS = 8  # runs with their own sections on the page of several


def pipeline(folder: Path) -> Page:
    """Return the page of a pipeline."""
    is_running = rundir.is_locked(folder)
    record = json_files.read_json(folder / "record.json") or {}
    status = status_of(folder, record, is_running)
    runs = [read(phase, phase.name) for phase in phases_of(folder)]

    def summary() -> list[Block]:
        notes = []
        for raft, choice in (record.get("chosen") or {}).items():
            note = f"of {choice['num_cycles']}, held-out accuracy {percent(choice['accuracy'])}"
            note += ", stopped early" if choice["stopped_early"] else ""
            notes.append([f"cycle chosen, {raft}", choice["cycle"], note])
        blocks: list[Block] = [run_page.headline(status, record.get("exit_code"), notes)]
        if status != "done":
            blocks.append(Note(run_page.verdict(status), mark_of(status)))
        for run in runs:
            if run.folder.parent != folder:
                source = f"an earlier run, {run.folder.parent.name}"
                blocks.append(Note(f"{run.folder.name} was reused from {source}."))
        rows = (
            {"phase": run.folder.name, "method": run.get("method", "name"), **_results(run)}
            for run in runs
        )
        return [*blocks, table("Phases", rows)]

    def evaluated() -> list[Block]:
        """Compare each evaluation with that of the model it came from."""
        by_name = {run.folder.name: run for run in runs}
        rows, pairs = [], []
        for phase, before in lineage.gains([key_charts.as_phase(run) for run in runs]):
            if before is not None:
                row: dict[str, Any] = {"evaluation": phase.name, "before": before.name}
                row |= {"accuracy before": percent_cell(before.accuracy)}
                row |= {"accuracy": percent_cell(phase.accuracy)}
                rows.append(
                    row | {"points": Cell(f"{lineage.gain_points(phase, before):+.1f}", True)}
                )
                pairs.append((by_name[before.name], by_name[phase.name]))
        note = (
            "Before: the nearest evaluation, on the same problems, "
            "of a model that this one was trained from."
        )
        return [table("What was gained", rows, note), *evaluations.compared(pairs)]

    sections = filled(
        {
            "Summary": summary,
            "Evaluation": evaluated,
            "Curves": lambda: [Charts(key_charts.phases(runs))],
            "Warnings": lambda: _warnings(runs),
        }
    )
    inner = [_inner(run, run.name, run.status not in ("done", "waiting")) for run in runs]
    labels = [(run.name, str(run.get("method", "name") or ""), run.status) for run in runs]
    return Page(folder.parent.name, folder.name, status, [*sections, *inner], labels)


def _inner(run: Run, title: str, is_open: bool = False) -> Section:
    details = Folded("Everything of this run", run_page.sections(run, curves=False), is_open)
    return Section(title, [details], run.status)


def compare(runs: Sequence[Run], names: Sequence[str]) -> Page:
    """Return the page of several runs with short labels; `names` are the full ones."""
    sections = filled(
        {
            "Differences": lambda: differences(runs),
            "Curves": lambda: [Charts(key_charts.shared_charts(runs))],
            "Results": lambda: [results(runs), *benchmarks(runs)],
            "Evaluation": lambda: evaluations.compared(evaluations.with_first(runs)),
            "Warnings": lambda: _warnings(runs),
        }
    )
    if len(runs) <= MOST_DETAILS:
        sections += [
            _inner(run, f"{run.name}: {name}") for run, name in zip(runs, names, strict=True)
        ]
    else:
        too_many = f"{len(runs)} runs are too many to show each on this page."
        note = Note(f"{too_many} Run launch/report.py with one of them.")
        sections.append(Section("Each run", [note]))
    labels = [(run.name, name, run.status) for run, name in zip(runs, names, strict=True)]
    statuses = {run.status for run in runs}
    status = statuses.pop() if len(statuses) == 1 else "mixed"
    return Page(f"{len(runs)} runs", "", status, sections, labels)


def differences(runs: Sequence[Run]) -> list[Block]:
    """Return a row for each value that is not the same in all runs.

    Compositions are compared within each method, unless each run has a method of its own: across
    methods nearly every key differs.
    """
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(text(run.get("method", "name")), []).append(run)
    groups: dict[str, Sequence[Run]] = {
        f"configuration, {name}": group for name, group in methods.items() if len(group) > 1
    }
    blocks = [
        _different(
            subject,
            group,
            [{k: v for k, v in run.config.items() if k not in NOT_COMPARED} for run in group],
        )
        for subject, group in (groups or {"configuration": runs}).items()
    ]
    recorded = [{key: run.record.get(key) for key in RECORDED} for run in runs]
    return [*blocks, _different("code, image, packages and host", runs, recorded)]


def _different(subject: str, runs: Sequence[Run], contents: Sequence[dict[str, Any]]) -> Block:
    values = [leaves("", content) for content in contents]
    rows = []
    for key in dict.fromkeys(key for content in values for key in content):
        row = [text(content[key]) if key in content else NONE for content in values]
        if len(set(row)) > 1:
            names = (run.name for run in runs)
            rows.append({"key": key, **dict(zip(names, row, strict=True))})
    same = Note(f"No difference in {subject}.")
    return table(f"Differences in {subject}", rows) if rows else same


def results(runs: Sequence[Run]) -> Table:
    rows = (
        {"run": run.name, **_results(run)}
        | {"MFU": run_tables.measured(run, "mfu"), "memory GB": run_tables.peak_gb(run)}
        for run in runs
    )
    note = (
        "Speeds are medians of the logged steps; losses, rewards and accuracies are those "
        "of the last one."
    )
    return table("Results", rows, note)


def _results(run: Run) -> dict[str, Any]:
    last: dict[str, Any] = {}
    if not run_tables.rows_of(run):
        last = run.metrics.last | {k: v for k, v in run.result.items() if v is not None}
    seconds, accuracy = run_page.elapsed_s(run), last.get("accuracy")
    return {
        "status": Cell(run.status, mark=mark_of(run.status)),
        "steps": last.get("step"),
        "loss": last.get("loss"),
        "reward": last.get("reward"),
        "accuracy": None if accuracy is None else percent_cell(accuracy),
        "tokens/s": run_tables.measured(run, "tokens_per_second"),
        "time": None if seconds is None else Cell(duration(seconds), True),
    }


def benchmarks(runs: Sequence[Run]) -> list[Table]:
    """Compare runs of the same benchmark row by row."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.result.get("benchmark"):
            groups.setdefault(str(run.result["benchmark"]), []).append(run)
    return [_side_by_side(name, group) for name, group in groups.items() if len(group) > 1]


def _side_by_side(name: str, runs: Sequence[Run]) -> Table:
    """Compare each row's figures. Columns that are not measured identify a row.

    A measured column has digits. A column of only integers is a size.
    """
    figure, rows_of = str(runs[0].result.get("figure")), [run_tables.rows_of(run) for run in runs]
    own = []
    for column in run_tables.columns_of(runs[0]):
        key = column["key"]
        is_size = all(isinstance(row.get(key), int) for rows in rows_of for row in rows)
        is_named = key not in (figure, *run_tables.UNNAMED_COLUMNS) and not key.startswith("share")
        if is_named and (column.get("digits") is None or is_size):
            own.append(column)
    by_key: dict[tuple[str, ...], dict[str, Any]] = {}
    for run, rows in zip(runs, rows_of, strict=True):
        for row in rows:
            key = tuple(text(row.get(column["key"])) for column in own)
            by_key.setdefault(key, {})[run.name] = row
    first, *others = (run.name for run in runs)
    table_rows = []
    for key, row_of in by_key.items():
        content: dict[str, Any] = dict(zip(map(run_tables.title_of, own), key, strict=True))
        values = {name: row_of.get(name, {}).get(figure) for name in (first, *others)}
        content |= {
            n: row_of.get(n, {}).get("error") if v is None else v for n, v in values.items()
        }
        for other in others:
            over = ratio(values[other], values[first], "{:.3f}")
            content[f"{other} over {first}"] = Cell(over, True)
        table_rows.append(content)
    return table(f"{name}: {figure}", table_rows)


def _warnings(runs: Sequence[Run]) -> list[Note]:
    """Return each warning once, with the runs that have it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for line in run.warnings:
            names.setdefault(line, []).append(run.name)
    return [Note(f"{', '.join(runs_)}: {line}") for line, runs_ in names.items()]
