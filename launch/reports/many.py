"""Build the page of several runs: differences, curves on shared axes, results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.reports import evaluations, one, series, tables
from launch.reports.curves import Charts
from launch.reports.data import Run, dig, is_number, mapping, objects
from launch.reports.parts import (
    NONE,
    Bars,
    Block,
    Cell,
    Figure,
    Figures,
    Inner,
    Note,
    Notes,
    Page,
    Table,
    cell,
    duration,
    filled,
    mark_of,
    number_cell,
    percent,
    percent_cell,
    status_figure,
    text,
)
from launch.study import lineage

# Keys that tell where a run is and not what it is: paths of a phase, output.
NOT_COMPARED = {"name", "run_root", "mode", "format", "verbose", "resume", "chosen", "speed_keeps"}
HOST = ("hostname", "kernel", "python", "num_cores", "amdgpu_driver", "rocm", "nvidia_driver")
MOST_LINEAGES = 4  # lineages of a pipeline whose accuracy is a headline; the table has all
MOST_DETAILS = 8  # runs with their own sections on the page of several
SHARED = ["status", "steps", "loss", "reward"]  # first columns of phases and of runs


def pipeline(
    folder: Path, status: str, exit_code: int | None, runs: Sequence[Run], chosen: Any = None
) -> Page:
    """Return the page of a pipeline. `chosen` is the entry of its record on RAFT's cycles."""
    tree = [series.as_phase(run) for run in runs]
    figures = [status_figure(status, exit_code), *_accuracies(tree), *_chosen_cycles(chosen)]
    blocks: list[Block] = [Figures(figures)]
    if status != "done":
        blocks.append(Note(one.verdict(status), mark_of(status)))
    for run in runs:
        if run.folder.parent != folder:
            source = f"an earlier run, {run.folder.parent.name}"
            blocks.append(Note(f"{run.folder.name} was reused from {source}."))
    columns = ["phase", "method", *SHARED, "held-out accuracy", "tokens/s", "time"]
    rows = [[run.folder.name, run.get("method", "name"), *_results(run)] for run in runs]
    by_name = {run.folder.name: run for run in runs}
    pairs = [
        (by_name[gain.before.name], by_name[gain.phase.name])
        for gain in lineage.gains(tree)
        if gain.before is not None
    ]
    sections: dict[str, Sequence[Block]] = {
        "Summary": [*blocks, Table("Phases", columns, rows), _gains(tree)],
        "Evaluation": evaluations.compared(pairs),
        "Curves": [Charts(series.phases(runs))],
        "Warnings": [_warnings(runs)],
    }
    inner = [
        _inner(run, run.folder.name, is_open=run.status not in ("done", "waiting")) for run in runs
    ]
    labels = [(run.name, str(run.get("method", "name") or ""), run.status) for run in runs]
    return Page(folder.parent.name, folder.name, status, filled(sections), inner, labels)


def _inner(run: Run, title: str, is_open: bool = False) -> Inner:
    return Inner(title, one.sections(run, curves=False), is_open, run.status)


def _accuracies(tree: Sequence[lineage.Phase]) -> list[Figure]:
    """Return the held-out accuracy at the end of each lineage."""
    figures, lines = [], lineage.lines(tree)
    for line in lines[:MOST_LINEAGES]:
        first, last = line[0], line[-1]
        points = lineage.Gain(last, first).points
        under = ""
        if points is not None and len(line) > 1:
            under = f"{points:+.1f} points, from {percent(first.accuracy or 0.0)} ({first.name})"
        title = "held-out accuracy" + (f", {last.name}" if len(lines) > 1 else "")
        figures.append(Figure(title, percent(last.accuracy or 0.0), under))
    return figures


def _chosen_cycles(chosen: Any) -> list[Figure]:
    """Return the cycle that each RAFT with method.selection took as its result."""
    figures = []
    for raft, choice in mapping(chosen).items():
        if is_number(accuracy := dig(choice, "accuracy")):
            under = f"of {text(choice.get('num_cycles'))}, held-out accuracy {percent(accuracy)}"
            under += ", stopped early" if choice.get("stopped_early") is True else ""
            figures.append(Figure(f"cycle chosen, {raft}", text(choice.get("cycle")), under))
    return figures


def _gains(tree: Sequence[lineage.Phase]) -> Table:
    """Compare each evaluation with that of the model it came from."""
    rows = []
    for gain in lineage.gains(tree):
        if gain.before is not None and gain.points is not None:
            shares = [percent_cell(phase.accuracy) for phase in (gain.before, gain.phase)]
            points = number_cell(f"{gain.points:+.1f}")
            rows.append([gain.phase.name, gain.before.name, *shares, points])
    columns = ["evaluation", "before", "accuracy before", "accuracy", "points"]
    note = (
        "Before: the nearest evaluation, on the same problems, "
        "of a model that this one was trained from."
    )
    return Table("What was gained", columns, rows, note=note)


def compare(runs: Sequence[Run], names: Sequence[str]) -> Page:
    """Return the page of several runs with short labels; `names` are the full ones."""
    sections: dict[str, Sequence[Block]] = {
        "Differences": differences(runs),
        "Curves": [Charts(series.together(runs))],
        "Results": [*results(runs), *benchmarks(runs), step_parts(runs)],
        "Evaluation": evaluations.compared(evaluations.with_first(runs)),
        "Warnings": [_warnings(runs)],
    }
    inner = []
    if len(runs) <= MOST_DETAILS:
        inner = [_inner(run, f"{run.name}: {name}") for run, name in zip(runs, names, strict=True)]
    else:
        too_many = f"{len(runs)} runs are too many to show each on this page."
        sections["Each run"] = [Note(f"{too_many} Run launch/report.py with one of them.")]
    labels = [(run.name, name, run.status) for run, name in zip(runs, names, strict=True)]
    statuses = {run.status for run in runs}
    status = statuses.pop() if len(statuses) == 1 else "mixed"
    return Page(f"{len(runs)} runs", "", status, filled(sections), inner, labels)


def differences(runs: Sequence[Run]) -> list[Block]:
    """Return a row for each value that is not the same in all runs.

    Compositions are compared within each method: across methods nearly every key differs.
    """
    caption = "Differences in configuration"
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(text(run.get("method", "name")), []).append(run)
    alone = [group[0] for group in methods.values() if len(group) == 1]
    if len(methods) == 1 or len(alone) == len(runs):
        same = "The configuration is the same in all."
        blocks = [_different(caption, runs, _composition, same)]
    else:
        blocks = [
            _different(
                f"{caption}: {name}",
                group,
                _composition,
                f"{name}: the configuration is the same in all.",
            )
            for name, group in methods.items()
            if len(group) > 1
        ]
        if alone:
            names = ", ".join(f"{run.name} ({text(run.get('method', 'name'))})" for run in alone)
            blocks.append(Note(f"The only one of its method: {names}."))
    subjects = "code, image, packages and host"
    same = f"{subjects.capitalize()} are the same in all."
    return [*blocks, _different(f"Differences in {subjects}", runs, _environment, same)]


def _different(
    caption: str, runs: Sequence[Run], values_of: Callable[[Run], dict[str, Any]], same: str
) -> Block:
    flats = [flat(values_of(run)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for values in flats for key in values):
        values = [text(values.get(key)) for values in flats]
        if len(set(values)) > 1:
            rows.append([key, *(text(values[key]) if key in values else NONE for values in flats)])
    return Table(caption, ["key", *(run.name for run in runs)], rows) if rows else Note(same)


def _composition(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in NOT_COMPARED}


def _environment(run: Run) -> dict[str, Any]:
    host = run.record.get("host") or {}
    changes = dig(run.record, "code", "diff_sha256")
    return {
        "code": {
            "commit": dig(run.record, "code", "commit"),
            "uncommitted changes": f"sha256 {str(changes)[:12]}" if changes else "none",
        },
        "image": run.record.get("image"),
        "packages": run.record.get("packages"),
        "host": {
            **{key: host.get(key) for key in HOST},
            "gpus": [str(gpu.get("product")) for gpu in objects(host.get("gpus"))],
        },
    }


def flat(content: Any, at: str = "") -> dict[str, Any]:
    """Return a.b.c: value for every leaf; a list is one."""
    if not isinstance(content, dict) or not content:
        return {at: content} if at else {}
    leaves: dict[str, Any] = {}
    for name, inner in content.items():
        leaves |= flat(inner, f"{at}.{name}" if at else str(name))
    return leaves


def results(runs: Sequence[Run]) -> list[Table]:
    columns = ["run", *SHARED, "accuracy", "tokens/s", "time", "MFU", "memory GB"]
    rows = []
    for run in runs:
        peak = tables.peak_gb(run)
        memory = cell(None if peak is None else round(peak, 2))
        mfu = percent_cell(tables.measured(run, "mfu"))
        rows.append([Cell(run.name), *_results(run), mfu, memory])
    has_value = [
        any(c.text not in ("", NONE) for c in column) for column in zip(*rows, strict=True)
    ]
    shown = [n for n in range(len(columns)) if n < 2 or has_value[n]]
    note = (
        "Speeds are medians of the logged steps; losses, rewards and accuracies are those "
        "of the last one."
    )
    rows = [[row[n] for n in shown] for row in rows]
    return [Table("Results", [columns[n] for n in shown], rows, note=note)]


def _results(run: Run) -> list[Cell]:
    """Return status, steps, loss, reward, accuracy, tokens/s and time."""
    last = {}
    if not tables.rows_of(run):
        last = run.metrics.last | {k: v for k, v in run.result.items() if v is not None}
    seconds = one.elapsed_s(run)
    return [
        Cell(run.status, mark=mark_of(run.status)),
        *(cell(last.get(key)) for key in ("step", "loss", "reward")),
        percent_cell(last.get("accuracy")),
        cell(tables.measured(run, "tokens_per_second")),
        cell(None) if seconds is None else number_cell(duration(seconds)),
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
    figure, rows_of = str(runs[0].result.get("figure")), [tables.rows_of(run) for run in runs]

    def is_measured(column: dict[str, Any]) -> bool:
        key = column["key"]
        if key == figure or key in tables.UNNAMED_COLUMNS or key.startswith("share"):
            return True
        is_size = all(isinstance(row.get(key), int) for rows in rows_of for row in rows)
        return tables.digits_of(column) is not None and not is_size

    own = [column for column in tables.columns_of(runs[0]) if not is_measured(column)]
    by_key = [_by_key(rows, [column["key"] for column in own]) for rows in rows_of]
    table = []
    for key in dict.fromkeys(key for rows in by_key for key in rows):
        same = [rows.get(key, {}) for rows in by_key]
        first, *others = values = [row.get(figure) for row in same]
        cells = [
            cell(value) if is_number(value) else Cell(str(row.get("error") or NONE))
            for value, row in zip(values, same, strict=True)
        ]
        ratios = [
            number_cell(f"{v / first:.3f}" if is_number(v) and is_number(first) and first else "")
            for v in others
        ]
        table.append([*key[:-1], *cells, *ratios])
    titles = [*map(tables.title_of, own), *(run.name for run in runs)]
    titles += [f"{run.name} over {runs[0].name}" for run in runs[1:]]
    return Table(f"{name}: {figure}", titles, table)


def _by_key(
    rows: Sequence[dict[str, Any]], keys: Sequence[str]
) -> dict[tuple[str, ...], dict[str, Any]]:
    """Index rows by their values of `keys` and a count of earlier rows with the same values."""
    indexed: dict[tuple[str, ...], dict[str, Any]] = {}
    seen: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        key = tuple(text(row.get(name)) for name in keys)
        indexed[(*key, str(seen[key]))] = row
        seen[key] += 1
    return indexed


def step_parts(runs: Sequence[Run]) -> Bars:
    """Show the step of each run that times generation, all on one scale."""
    bars = [
        replace(bar, title=f"{run.name}: {bar.title}")
        for run in runs
        for bar in tables.step_parts(run).bars
    ]
    longest = max((bar.whole for bar in bars), default=0.0)
    note = "Seconds of a step, all on one scale."
    return Bars([replace(bar, whole=longest) for bar in bars], note)


def _warnings(runs: Sequence[Run]) -> Notes:
    """Return each warning once, with the runs that have it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for line in run.warnings:
            names.setdefault(line, []).append(run.name)
    return Notes([f"{', '.join(runs_)}: {line}" for line, runs_ in names.items()])
