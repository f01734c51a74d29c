"""What a page says of several runs: what differs in their configuration, then their curves on one axis, then a table of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.pipelines import lineage
from launch.reports import evaluations, one, series, tables
from launch.reports.curves import Charts
from launch.reports.data import Run, dig, is_number, objects, table
from launch.reports.parts import Bars, Cell, Figure, Figures, Inner, Note, Notes, Page, Section, Table, cell, duration, percent, text

# Keys of a composition that say where and not what: paths of a phase, prints.
NOT_COMPARED = {"name", "run_root", "mode", "format", "verbose", "resume", "chosen", "speed_keeps"}
MOST_LINEAGES = 4  # of a pipeline, whose accuracy stands above everything; the table has all
MOST_DETAILS = 8  # runs whose own sections are on the page of several


def pipeline(folder: Path, status: str, exit_code: int | None, runs: Sequence[Run], chosen: Any = None) -> Page:
    """A page of phases: what each reached, curves through all of them, then each phase. `chosen`: what its record says of RAFT's cycles."""
    columns = ["phase", "method", "status", "steps", "loss", "reward", "held-out accuracy", "tokens/s", "time"]
    rows = [[Cell(run.folder.name), cell(run.get("method", "name")), _status(run), *_figures(run)] for run in runs]
    tree = [series.as_phase(run) for run in runs]
    figures = [Figure("status", status, f"exit code {exit_code}" if exit_code is not None else "", one.mark_of(status))]
    lines = lineage.lines(tree)
    for line in lines[:MOST_LINEAGES]:
        points = lineage.Gain(line[-1], line[0]).points
        under = (
            f"{points:+.1f} points, from {percent(line[0].accuracy or 0.0)} ({line[0].name})"
            if points is not None and len(line) > 1
            else ""
        )
        title = "held-out accuracy" if len(lines) == 1 else f"held-out accuracy, {line[-1].name}"
        figures.append(Figure(title, percent(line[-1].accuracy or 0.0), under))
    figures += _chosen(chosen)
    verdict = [] if status == "done" else [Note(one.VERDICTS.get(status, f"Its record says {status}."), one.mark_of(status))]
    kept = [Note(f"{run.folder.name} was kept of {run.folder.parent.name}, an earlier run.") for run in runs if run.folder.parent != folder]
    blocks = [Figures(figures), *verdict, *kept, Table("Phases", columns, rows), *_gains(tree)]
    charts = series.phases(runs)
    named = {run.folder.name: run for run in runs}
    pairs = [(named[gain.before.name], named[gain.phase.name]) for gain in lineage.gains(tree) if gain.before is not None]
    found = [
        Section("Summary", blocks),
        Section("Evaluation", evaluations.compared(pairs)),
        Section("Curves", [Charts(charts)] if charts else []),
        _warnings(runs),
    ]
    inner = [Inner(run.folder.name, one.sections(run, curves=False), run.status not in ("done", "waiting"), run.status) for run in runs]
    labels = [(run.name, str(run.get("method", "name") or ""), run.status) for run in runs]
    return Page(folder.parent.name, folder.name, status, [s for s in found if s.blocks], inner, labels)


def _chosen(content: Any) -> list[Figure]:
    """The cycle of each RAFT that is its result, where method.selection was asked for."""
    found = []
    for raft, choice in table(content).items():
        accuracy, early = dig(table(content), raft, "accuracy"), dig(table(content), raft, "stopped_early") is True
        if is_number(accuracy):
            under = f"of {text(choice.get('num_cycles'))}, held-out accuracy {percent(accuracy)}" + (", stopped early" if early else "")
            found.append(Figure(f"cycle chosen, {raft}", text(choice.get("cycle")), under))
    return found


def _gains(tree: Sequence[lineage.Phase]) -> list[Any]:
    """Each evaluation beside that of the model it came from; nothing where there is no such pair."""
    rows = []
    for gain in lineage.gains(tree):
        if gain.before is not None and gain.points is not None:
            shares = [percent(phase.accuracy or 0.0) for phase in (gain.before, gain.phase)]
            cells = [Cell(gain.phase.name), Cell(gain.before.name), *(Cell(share, number=True) for share in shares)]
            rows.append([*cells, Cell(f"{gain.points:+.1f}", number=True)])
    note = "Before: the nearest evaluation, on the same problems, of a model that this one was trained from."
    return [Table("What was gained", ["evaluation", "before", "accuracy before", "accuracy", "points"], rows, note=note)] if rows else []


def compare(runs: Sequence[Run], names: Sequence[str]) -> Page:
    """`runs` carry short labels; `names` are the whole ones."""
    labels = [(run.name, name, run.status) for run, name in zip(runs, names, strict=True)]
    charts = series.together(runs)
    sections = [
        Section("Differences", differences(runs)),
        Section("Curves", [Charts(charts)] if charts else []),
        Section("Results", [*results(runs), *benchmarks(runs), *step_parts(runs)]),
        Section("Evaluation", evaluations.compared(evaluations.with_first(runs))),
        _warnings(runs),
    ]
    inner = [
        Inner(f"{run.name}: {name}", one.sections(run, curves=False), False, run.status) for run, name in zip(runs, names, strict=True)
    ]
    statuses = {run.status for run in runs}
    status = statuses.pop() if len(statuses) == 1 else "mixed"
    shown = [section for section in sections if section.blocks]
    if len(inner) > MOST_DETAILS:
        shown.append(
            Section(
                "Each run", [Note(f"{len(inner)} runs are too many to show each on this page: launch/report.py with one of them does.")]
            )
        )
        inner = []
    return Page(f"{len(runs)} runs", "", status, shown, inner, labels)


def differences(runs: Sequence[Run]) -> list[Any]:
    """A row for each value that is not the same in all: of the composition, then of code, image, packages, host. Of several methods, as
    the phases of pipelines are, compositions are compared within each: across them nearly every key differs."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(text(run.get("method", "name")), []).append(run)
    alone = [group[0] for group in methods.values() if len(group) == 1]
    if len(methods) == 1 or len(alone) == len(runs):
        blocks = [_different("Differences in configuration", runs, _composition, "The configuration is the same in all.")]
    else:
        blocks = [
            _different(f"Differences in configuration: {name}", group, _composition, f"{name}: the configuration is the same in all.")
            for name, group in methods.items()
            if len(group) > 1
        ]
        if alone:
            named = ", ".join(f"{run.name} ({text(run.get('method', 'name'))})" for run in alone)
            blocks.append(Note(f"The only one of its method: {named}."))
    same = "Code, image, packages and host are the same in all."
    return [*blocks, _different("Differences in code, image, packages and host", runs, _around, same)]


def _different(caption: str, runs: Sequence[Run], of: Callable[[Run], dict[str, Any]], same: str) -> Table | Note:
    flats = [flat(of(run)) for run in runs]
    keys = [key for key in dict.fromkeys(k for f in flats for k in f) if len({text(f.get(key)) for f in flats}) > 1]
    rows = [[Cell(key), *(Cell(text(f[key])) if key in f else Cell("–") for f in flats)] for key in keys]
    return Table(caption, ["key", *(run.name for run in runs)], rows) if rows else Note(same)


def _composition(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in NOT_COMPARED}


def _around(run: Run) -> dict[str, Any]:
    return {"code": _code(run), "image": run.record.get("image"), "packages": run.record.get("packages"), "host": _host(run)}


def _code(run: Run) -> dict[str, Any]:
    changes = dig(run.record, "code", "diff_sha256")
    return {"commit": dig(run.record, "code", "commit"), "changes not committed": f"sha256 {str(changes)[:12]}" if changes else "none"}


def _host(run: Run) -> dict[str, Any]:
    host = run.record.get("host") or {}
    kept = {key: host.get(key) for key in ("hostname", "kernel", "python", "num_cores", "amdgpu_driver", "rocm", "nvidia_driver")}
    return {**kept, "gpus": [str(gpu.get("product")) for gpu in objects(host.get("gpus"))]}


def flat(content: Any, at: str = "") -> dict[str, Any]:
    """a.b.c: value for every leaf; a list is one."""
    if isinstance(content, dict) and content:
        return {key: value for name, inner in content.items() for key, value in flat(inner, f"{at}.{name}" if at else str(name)).items()}
    return {at: content} if at else {}


def results(runs: Sequence[Run]) -> list[Any]:
    columns = ["run", "status", "steps", "loss", "reward", "accuracy", "tokens/s", "time", "MFU", "memory GB"]
    rows = [[Cell(run.name), _status(run), *_figures(run), *_more(run)] for run in runs]
    kept = [n for n in range(len(columns)) if n < 2 or any(row[n].text not in ("", "–") for row in rows)]
    note = "Speeds are medians of the logged steps; losses, rewards and accuracies those of the last one."
    return [Table("Results", [columns[n] for n in kept], [[row[n] for n in kept] for row in rows], note=note)]


def _status(run: Run) -> Cell:
    return Cell(run.status, mark=one.mark_of(run.status))


def _figures(run: Run) -> list[Cell]:
    """steps, loss, reward, accuracy, tokens/s, time."""
    last = {} if tables.rows_of(run) else {**run.metrics.last, **{k: v for k, v in run.result.items() if v is not None}}
    accuracy, seconds = last.get("accuracy"), one.elapsed_s(run)
    shown = Cell(percent(accuracy), number=True) if is_number(accuracy) else cell(None)
    time = Cell(duration(seconds), number=True) if seconds is not None else cell(None)
    return [
        cell(last.get("step")),
        cell(last.get("loss")),
        cell(last.get("reward")),
        shown,
        cell(tables.measured(run, "tokens_per_second")),
        time,
    ]


def _more(run: Run) -> list[Cell]:
    mfu, peak = tables.measured(run, "mfu"), tables.peak_gb(run)
    return [Cell(percent(mfu), number=True) if mfu is not None else cell(None), cell(None if peak is None else round(peak, 2))]


def benchmarks(runs: Sequence[Run]) -> list[Any]:
    """The figure of runs of one benchmark side by side, row by row; a row is known by the columns that are no measurement.

    A measurement has digits, and is no whole number in every row: that is a size.
    """
    blocks: list[Any] = []
    for name in dict.fromkeys(str(run.result["benchmark"]) for run in runs if run.result.get("benchmark")):
        same = [run for run in runs if str(run.result.get("benchmark")) == name]
        if len(same) > 1:
            blocks.append(_side_by_side(name, same))
    return blocks


def _side_by_side(name: str, runs: Sequence[Run]) -> Table:
    figure = str(runs[0].result.get("figure"))
    columns = tables.columns_of(runs[0])
    values_of = {c["key"]: [row.get(c["key"]) for run in runs for row in tables.rows_of(run)] for c in columns}
    sizes = {key for key, values in values_of.items() if all(isinstance(v, int) for v in values)}
    measured = {figure, *tables.SAID_OF_ROWS, *(c["key"] for c in columns if tables.digits_of(c) is not None and c["key"] not in sizes)}
    own = [c for c in columns if c["key"] not in measured and not str(c["key"]).startswith("share")]
    found = [_by_key(tables.rows_of(run), [c["key"] for c in own]) for run in runs]
    rows = []
    for key in dict.fromkeys(k for rows_ in found for k in rows_):
        values = [rows_.get(key, {}).get(figure) for rows_ in found]
        first = values[0]
        cells = [
            cell(value) if is_number(value) else Cell(str(r.get(key, {}).get("error") or "–"))
            for value, r in zip(values, found, strict=True)
        ]
        ratios = [Cell(f"{v / first:.3f}", number=True) if is_number(v) and is_number(first) and first else Cell("") for v in values[1:]]
        rows.append([*map(Cell, key[:-1]), *cells, *ratios])
    titles = [*map(tables.title_of, own), *(run.name for run in runs), *(f"{run.name} over {runs[0].name}" for run in runs[1:])]
    return Table(f"{name}: {figure}", titles, rows)


def _by_key(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows by their values of `keys`, and how many there were before with the same."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    before: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        key = tuple(text(row.get(name)) for name in keys)
        found[(*key, str(before[key]))] = row
        before[key] += 1
    return found


def step_parts(runs: Sequence[Run]) -> list[Any]:
    """Of each run that times generation."""
    found = [(run, block) for run in runs for block in tables.step_parts(run) if isinstance(block, Bars)]
    if not found:
        return []
    bars = [type(bar)(f"{run.name}: {bar.title}", bar.pieces, bar.whole, bar.unit) for run, block in found for bar in block.bars]
    longest = max(bar.whole for bar in bars)
    return [Bars([type(bar)(bar.title, bar.pieces, longest, bar.unit) for bar in bars], "Seconds of a step, all on one scale.")]


def _warnings(runs: Sequence[Run]) -> Section:
    """Each once, with the runs that have it."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for line in [*run.notes, *map(text, run.plan.get("warnings") or [])]:
            said.setdefault(line, []).append(run.name)
    return Section("Warnings", [Notes([f"{', '.join(names)}: {line}" for line, names in said.items()])] if said else [])
