"""Build the page of a pipeline, and the page that compares several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.config.request import leaves
from launch.core import json_files
from launch.plan import rundir
from launch.reports import evaluations, key_charts, run_page, run_tables
from launch.reports.curves import Charts
from launch.reports.formats import NONE, duration, mark_of, percent, ratio, text
from launch.reports.parts import (
    Block,
    Cell,
    Folded,
    Note,
    Page,
    Section,
    Table,
    build_sections,
    percent_cell,
    table,
)
from launch.reports.run_files import Run, phases_of, read, status_of
from launch.study import lineage

# Keys of the composition that do not affect the results.
NOT_COMPARED = {"name", "run_root", "mode", "format", "verbose", "resume", "chosen", "speed_keeps"}
RECORDED = ("code", "image", "packages", "host")  # keys of record.json that are compared
MAX_SECTIONS = 8  # runs that have separate sections on a page of several runs


def pipeline(folder: Path) -> Page:
    """Return the page of the pipeline in a run directory."""
    was_locked = rundir.is_locked(folder)
    record = json_files.read_json(folder / "record.json") or {}
    status = status_of(folder, record, was_locked)
    runs = [read(phase, phase.name) for phase in phases_of(folder)]

    def summary() -> list[Block]:
        figures = []
        for raft, choice in (record.get("chosen") or {}).items():
            note = f"of {choice['num_cycles']}, held-out "
            note += f"{choice.get('metric', 'accuracy')} {percent(choice['accuracy'])}"
            note += ", stopped early" if choice["stopped_early"] else ""
            figures.append([f"best cycle of {raft}", choice["cycle"], note])
        blocks: list[Block] = [run_page.headline(status, record.get("exit_code"), figures)]
        if status != "done":
            blocks.append(Note(run_page.verdict(status), mark_of(status)))
        for run in runs:
            if run.folder.parent != folder:
                source = f"the earlier run {run.folder.parent.name}"
                blocks.append(Note(f"{run.folder.name} was reused from {source}."))
        for phase, why in (record.get("not_run") or {}).items():
            blocks.append(Note(f"{phase} was not run: {why}", "warn"))
        rows = (
            {"phase": run.folder.name, "method": run.get("method", "name"), **_results(run)}
            for run in runs
        )
        return [*blocks, table("Phases", rows)]

    def evaluation() -> list[Block]:
        """Compare each evaluation with an earlier one in its lineage."""
        by_name = {run.folder.name: run for run in runs}
        rows, pairs = [], []
        for phase, before in lineage.gains([key_charts.as_phase(run) for run in runs]):
            if before is not None:
                row: dict[str, Any] = {"evaluation": phase.name, "before": before.name}
                row |= {f"{phase.measure} before": percent_cell(before.score)}
                row |= {phase.measure: percent_cell(phase.score)}
                gain = f"{lineage.gain_points(phase, before):+.1f}"
                rows.append(row | {"change (points)": Cell(gain, True)})
                pairs.append((by_name[before.name], by_name[phase.name]))
        note = "Before: the nearest earlier evaluation in the lineage on the same problems."
        return [table("Gains", rows, note), *evaluations.comparisons(pairs)]

    sections = build_sections(
        {
            "Summary": summary,
            "Evaluation": evaluation,
            "Curves": lambda: [Charts(key_charts.phases(runs))],
            "Warnings": lambda: _warnings(runs),
        }
    )
    details = [_details(run, run.name, run.status not in ("done", "waiting")) for run in runs]
    labels = [(run.name, str(run.get("method", "name") or ""), run.status) for run in runs]
    return Page(folder.parent.name, folder.name, status, [*sections, *details], labels)


def _details(run: Run, title: str, is_open: bool = False) -> Section:
    """Return a section with everything that the page of one run shows, except its curves."""
    folded = Folded("Details of this run", run_page.sections(run, curves=False), is_open)
    return Section(title, [folded], run.status)


def compare(runs: Sequence[Run], names: Sequence[str]) -> Page:
    """Return the page that compares runs; `names` are their full names, and run.name is short."""
    sections = build_sections(
        {
            "Differences": lambda: differences(runs),
            "Curves": lambda: [Charts(key_charts.shared_charts(runs))],
            "Results": lambda: [results(runs), *benchmarks(runs)],
            "Evaluation": lambda: evaluations.comparisons(evaluations.pairs_with_first(runs)),
            "Warnings": lambda: _warnings(runs),
        }
    )
    if len(runs) <= MAX_SECTIONS:
        sections += [
            _details(run, f"{run.name}: {name}") for run, name in zip(runs, names, strict=True)
        ]
    else:
        note = f"This page has no details of its {len(runs)} runs, only of {MAX_SECTIONS} or fewer."
        note += " Use: python launch/report.py <one run>."
        sections.append(Section("Each run", [Note(note)]))
    labels = [(run.name, name, run.status) for run, name in zip(runs, names, strict=True)]
    statuses = {run.status for run in runs}
    status = statuses.pop() if len(statuses) == 1 else "mixed"
    return Page(f"{len(runs)} runs", "", status, sections, labels)


def differences(runs: Sequence[Run]) -> list[Block]:
    """Return tables of the values that are not the same in all runs.

    Compositions are compared within each method, because nearly every key differs between methods.
    If no two runs have the same method, all are compared.
    """
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(text(run.get("method", "name")), []).append(run)
    groups: dict[str, Sequence[Run]] = {
        f"configuration, {name}": group for name, group in methods.items() if len(group) > 1
    }
    blocks = [
        _differences_in(
            subject,
            group,
            [{k: v for k, v in run.config.items() if k not in NOT_COMPARED} for run in group],
        )
        for subject, group in (groups or {"configuration": runs}).items()
    ]
    recorded = [{key: run.record.get(key) for key in RECORDED} for run in runs]
    return [*blocks, _differences_in("code, image, packages and host", runs, recorded)]


def _differences_in(subject: str, runs: Sequence[Run], contents: Sequence[dict[str, Any]]) -> Block:
    """Return a table of the nested keys that differ between the runs' contents, or a note."""
    values_by_run = [leaves("", content) for content in contents]
    rows = []
    for key in dict.fromkeys(key for values in values_by_run for key in values):
        row = [text(values[key]) if key in values else NONE for values in values_by_run]
        if len(set(row)) > 1:
            names = (run.name for run in runs)
            rows.append({"key": key, **dict(zip(names, row, strict=True))})
    if not rows:
        return Note(f"No difference in {subject}.")
    return table(f"Differences in {subject}", rows)


def results(runs: Sequence[Run]) -> Table:
    rows = (
        {"run": run.name, **_results(run)}
        | {"MFU": run_tables.measured(run, "mfu"), "memory GB": run_tables.peak_gb(run)}
        for run in runs
    )
    note = (
        "Speeds are medians of the logged steps. Losses, rewards and accuracies are from "
        "the last step."
    )
    return table("Results", rows, note)


def _results(run: Run) -> dict[str, Any]:
    """Return status, progress, last metrics, speed and time of a run by column."""
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
    """Return a benchmark's main figure by row and run, with ratios to the first run.

    The columns of sizes and settings identify a row. Measured columns have `digits`, but a column
    of integers only is a size.
    """
    figure, rows_of = str(runs[0].result.get("figure")), [run_tables.rows_of(run) for run in runs]
    key_columns = []
    for column in run_tables.columns_of(runs[0]):
        key = column["key"]
        is_size = all(isinstance(row.get(key), int) for rows in rows_of for row in rows)
        is_result = key in (figure, *run_tables.UNLISTED_COLUMNS) or key.startswith("share")
        if not is_result and (column.get("digits") is None or is_size):
            key_columns.append(column)
    by_key: dict[tuple[str, ...], dict[str, Any]] = {}
    for run, rows in zip(runs, rows_of, strict=True):
        for row in rows:
            key = tuple(text(row.get(column["key"])) for column in key_columns)
            by_key.setdefault(key, {})[run.name] = row
    first, *others = (run.name for run in runs)
    titles = [run_tables.title_of(column) for column in key_columns]
    table_rows = []
    for key, row_of in by_key.items():
        content: dict[str, Any] = dict(zip(titles, key, strict=True))
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
    """Return each warning once, prefixed by the names of its runs."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for warning in run.warnings:
            names.setdefault(warning, []).append(run.name)
    return [Note(f"{', '.join(runs_)}: {warning}") for warning, runs_ in names.items()]
