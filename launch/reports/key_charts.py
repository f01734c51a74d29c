"""Turn the keys of metrics.jsonl into titled charts of a run, several runs or a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launch.reports import run_tables
from launch.reports.curves import Chart, Charts, Curve, curve, with_mean
from launch.reports.formats import TITLES
from launch.reports.parts import Folded
from launch.reports.run_files import Points, Run
from launch.study import lineage

MAIN: dict[str, tuple[str, str, bool]] = TITLES["charts"]
TELEMETRY: dict[str, tuple[str, str, bool]] = TITLES["telemetry"]
HELD_OUT = "eval_"  # prefix of held-out figures, which share a chart with training figures
PARTS = {"step_s": "complete step", **TITLES["step"], "server_s": "generation on the server"}


def points_of(run: Run, key: str, unit: str) -> Points:
    """Return the logged steps and values of a key; shares are in percent if the unit is %."""
    steps, values = run_tables.logged(run, key)
    return steps, [100 * value for value in values] if unit == "%" else values


def main(run: Run) -> list[Chart]:
    """Return the charts of MAIN and of a step's parts, if the run logs them."""
    charts = []
    for key, (title, unit, from_zero) in MAIN.items():
        points = points_of(run, key, unit)
        if not points[1] or _shares_chart(run, key):
            continue
        held_out = points_of(run, HELD_OUT + key, unit)
        if held_out[1]:
            curves = [Curve("training", points), Curve("held out", held_out, 1)]
        else:
            curves = with_mean(Curve(title, points))
        charts.append(Chart(title, curves, unit, from_zero=from_zero))
    parts = [
        Curve(name, points, n)
        for n, (key, name) in enumerate(PARTS.items())
        if (points := run.metrics.points(key))[1]
    ]
    if len(parts) > 1:
        charts.append(Chart("Parts of a step", parts, "s", from_zero=True))
    return charts


def shared_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of MAIN, each with a curve for every run that logs its key."""
    if len(runs) == 1:
        return main(runs[0])
    return _by_key((n, run, 0) for n, run in enumerate(runs))


def _by_key(runs: Iterable[tuple[int, Run, int]], x_title: str = "step") -> list[Chart]:
    """Return the charts of MAIN for runs with their curve numbers and the steps before them."""
    runs, charts = list(runs), []
    for key, (title, unit, from_zero) in MAIN.items():
        curves = []
        for number, run, before in runs:
            steps, values = points_of(run, key, unit)
            if values:
                curves.append(Curve(run.name, ([before + step for step in steps], values), number))
        if curves:
            charts.append(Chart(title, curves, unit, x_title, from_zero))
    return charts


def telemetry(run: Run) -> list[Chart]:
    """Return a chart of each GPU counter that the run logs."""
    return [
        Chart(title, [Curve(title, points)], unit, from_zero=from_zero)
        for key, (title, unit, from_zero) in TELEMETRY.items()
        if (points := points_of(run, key, unit))[1]
    ]


def others(run: Run) -> list[Folded]:
    """Return folded charts of all other keys whose values change."""
    keys = run.metrics.numeric_keys
    drawn = {*MAIN, *TELEMETRY, *TITLES["not_drawn"], *(PARTS if "train_s" in keys else ())}
    charts = []
    for key in keys if not run_tables.rows_of(run) else ():
        if key not in drawn and not _shares_chart(run, key):
            points = run.metrics.points(key)
            charts += [Chart(key, [Curve(key, points)])] if len(set(points[1])) > 1 else []
    return [Folded(f"{len(charts)} curve(s)", [Charts(charts)])] if charts else []


def _shares_chart(run: Run, key: str) -> bool:
    """Return whether `key` is a held-out figure that is drawn with its training figure."""
    training_key = key.removeprefix(HELD_OUT)
    is_logged = bool(run.metrics.points(training_key)[1])
    return training_key != key and training_key in MAIN and is_logged


def as_phase(run: Run) -> lineage.Phase:
    trains = run.get("method", "kind") == "trainer"
    return lineage.read_phase(run.folder, run.get("model") or {}, trains)


def phases(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of a pipeline.

    A phase's steps are counted from the first model of its lineage. Held-out scores are drawn for
    each lineage and by RAFT's cycles.
    """
    tree = [as_phase(run) for run in runs]
    axis = "step, counted from the pipeline's first model"
    training_runs = (
        (n, run, lineage.steps_before(tree, phase))
        for n, (run, phase) in enumerate(zip(runs, tree, strict=True))
        if run.get("method", "kind") == "trainer"
    )
    lines = lineage.lineages(tree)
    title = f"Held-out {lines[0][0].measure if lines else 'accuracy'}"
    scores = [
        curve(
            title if len(lines) == 1 else f"to {line[-1].name}",
            [(lineage.steps_before(tree, p), 100 * float(p.score or 0.0)) for p in line],
            n,
            dots=len(line) == 1,
        )
        for n, line in enumerate(lines)
    ]
    cycles = {name: points for name, points in lineage.cycles(tree).items() if len(points) > 1}
    by_cycle = [
        curve(name, [(cycle, 100 * score) for cycle, score in points], n)
        for n, (name, points) in enumerate(cycles.items())
    ]
    charts = [
        Chart(title, scores, "%", axis, True),
        *_by_key(training_runs, axis),
        Chart(f"{title} by RAFT cycle", by_cycle, "%", "cycle", True),
    ]
    return [chart for chart in charts if chart.curves]
