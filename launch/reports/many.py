"""Build the page of several runs: differences, curves on shared axes, results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    cell,
    duration,
    filled,
    mark_of,
    percent,
    percent_cell,
    text,
)
from launch.reports.run_files import Run, is_number, phases_of, read, status_of
from launch.study import lineage

# Keys that say where a run is, not what it computes: paths of a phase, output.
NOT_COMPARED = {"name", "run_root", "mode", "format", "verbose", "resume", "chosen", "speed_keeps"}
RECORDED = ("code", "image", "packages", "host")
MOST_DETAILS = 8  # runs with their own sections on the page of several
SHARED = ["status", "steps", "loss", "reward"]  # first columns of phases and of runs


def pipeline(folder: Path) -> Page:
    """Return the page of a pipeline."""
    held = rundir.is_locked(folder)
    record = json_files.read_json(folder / "record.json") or {}
    status = status_of(folder, record, held)
    runs = [read(phase, phase.name) for phase in phases_of(folder)]

    def summary() -> list[Block]:
        chosen = []
        for raft, choice in (record.get("chosen") or {}).items():
            note = f"of {choice['num_cycles']}, held-out accuracy {percent(choice['accuracy'])}"
            note += ", stopped early" if choice["stopped_early"] else ""
            chosen.append([f"cycle chosen, {raft}", choice["cycle"], note])
        blocks: list[Block] = [run_page.headline(status, record.get("exit_code"), chosen)]
        if status != "done":
            blocks.append(Note(run_page.verdict(status), mark_of(status)))
        for run in runs:
            if run.folder.parent != folder:
                source = f"an earlier run, {run.folder.parent.name}"
                blocks.append(Note(f"{run.folder.name} was reused from {source}."))
        columns = ["phase", "method", *SHARED, "held-out accuracy", "tokens/s", "time"]
        rows = [[run.folder.name, run.get("method", "name"), *_results(run)] for run in runs]
        return [*blocks, Table("Phases", columns, rows)]

    def evaluated() -> list[Block]:
        """Compare each evaluation with that of the model it came from."""
        by_name = {run.folder.name: run for run in runs}
        rows, pairs = [], []
        for phase, before in lineage.gains([key_charts.as_phase(run) for run in runs]):
            if before is not None:
                points = Cell(f"{lineage.points(phase, before):+.1f}", True)
                shares = [percent_cell(before.accuracy), percent_cell(phase.accuracy)]
                rows.append([phase.name, before.name, *shares, points])
                pairs.append((by_name[before.name], by_name[phase.name]))
        columns = ["evaluation", "before", "accuracy before", "accuracy", "points"]
        note = (
            "Before: the nearest evaluation, on the same problems, "
            "of a model that this one was trained from."
        )
        return [
            Table("What was gained", columns, rows, note=note),
            *evaluations.compared(pairs),
        ]

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
    flats = list(map(flat, contents))
    rows = []
    for key in dict.fromkeys(key for values in flats for key in values):
        row = [text(values[key]) if key in values else NONE for values in flats]
        if len(set(row)) > 1:
            rows.append([key, *row])
    columns = ["key", *(run.name for run in runs)]
    same = Note(f"No difference in {subject}.")
    return Table(f"Differences in {subject}", columns, rows) if rows else same


def flat(content: Any, at: str = "") -> dict[str, Any]:
    """Return a.b.c: value for every leaf; a list is one."""
    if not isinstance(content, dict) or not content:
        return {at: content} if at else {}
    leaves: dict[str, Any] = {}
    for name, inner in content.items():
        leaves |= flat(inner, f"{at}.{name}" if at else str(name))
    return leaves


def results(runs: Sequence[Run]) -> Table:
    columns = ["run", *SHARED, "accuracy", "tokens/s", "time", "MFU", "memory GB"]
    rows = [
        [
            Cell(run.name),
            *_results(run),
            percent_cell(run_tables.measured(run, "mfu")),
            cell(run_tables.peak_gb(run)),
        ]
        for run in runs
    ]
    # Leave out columns that no run has.
    shown = [n for n in range(len(columns)) if any(row[n].text != NONE for row in rows)]
    note = (
        "Speeds are medians of the logged steps; losses, rewards and accuracies are those "
        "of the last one."
    )
    rows = [[row[n] for n in shown] for row in rows]
    return Table("Results", [columns[n] for n in shown], rows, note=note)


def _results(run: Run) -> list[Cell]:
    """Return status, steps, loss, reward, accuracy, tokens/s and time."""
    last = {}
    if not run_tables.rows_of(run):
        last = run.metrics.last | {k: v for k, v in run.result.items() if v is not None}
    seconds = run_page.elapsed_s(run)
    return [
        Cell(run.status, mark=mark_of(run.status)),
        *(cell(last.get(key)) for key in ("step", "loss", "reward")),
        percent_cell(last.get("accuracy")),
        cell(run_tables.measured(run, "tokens_per_second")),
        cell(None) if seconds is None else Cell(duration(seconds), True),
    ]


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
    measured = {figure, *run_tables.UNNAMED_COLUMNS}
    for column in run_tables.columns_of(runs[0]):
        key = column["key"]
        is_size = all(isinstance(row.get(key), int) for rows in rows_of for row in rows)
        if key.startswith("share") or (column.get("digits") is not None and not is_size):
            measured.add(key)
    own = [column for column in run_tables.columns_of(runs[0]) if column["key"] not in measured]
    by_key: list[dict[tuple[str, ...], dict[str, Any]]] = []
    for rows in rows_of:
        counts: Counter[tuple[str, ...]] = Counter()  # rows without a difference keep their order
        by_key.append({})
        for row in rows:
            key = tuple(text(row.get(column["key"])) for column in own)
            by_key[-1][*key, str(counts[key])] = row
            counts[key] += 1
    table = []
    for key in dict.fromkeys(key for rows in by_key for key in rows):
        same = [rows.get(key, {}) for rows in by_key]
        first, *others = [row.get(figure) for row in same]
        cells = [cell(row.get("error") if row.get(figure) is None else row[figure]) for row in same]
        ratios = [
            Cell(f"{v / first:.3f}" if is_number(v) and is_number(first) and first else "", True)
            for v in others
        ]
        table.append([*key[:-1], *cells, *ratios])
    titles = [*map(run_tables.title_of, own), *(run.name for run in runs)]
    titles += [f"{run.name} over {runs[0].name}" for run in runs[1:]]
    return Table(f"{name}: {figure}", titles, table)


def _warnings(runs: Sequence[Run]) -> list[Note]:
    """Return each warning once, with the runs that have it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for line in run.warnings:
            names.setdefault(line, []).append(run.name)
    return [Note(f"{', '.join(runs_)}: {line}") for line, runs_ in names.items()]
