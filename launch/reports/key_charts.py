"""Choose which keys of metrics.jsonl are drawn, in which charts, under which names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launch.reports import run_tables
from launch.reports.curves import Chart, Charts, Curve, curve, with_mean
from launch.reports.parts import TITLES, Folded
from launch.reports.run_files import Points, Run
from launch.study import lineage

MAIN: dict[str, tuple[str, str, bool]] = TITLES["charts"]
TELEMETRY: dict[str, tuple[str, str, bool]] = TITLES["telemetry"]
HELD_OUT = "eval_"  # prefix of held-out figures, drawn next to training figures
LEVEL_SHARE = "level_share/"  # prefix of a curriculum's keys, one for each level
# launch/study/cycles.py names the sampling phases of RAFT like this.
SAMPLED = re.compile(r"\d+_(?:(.+)_)?cycle(\d+)_sample")
PARTS = {"step_s": "whole step", **TITLES["step"], "server_s": "the server's generation"}


def points_of(run: Run, key: str, unit: str) -> Points:
    steps, values = run_tables.logged(run, key)
    return steps, [100 * value for value in values] if unit == "%" else values


def _chart(key: str, curves: Sequence[Curve], x_title: str = "step") -> Chart:
    title, unit, from_zero = MAIN[key]
    return Chart(title, curves, unit, x_title, from_zero)


def main(run: Run) -> list[Chart]:
    """Return the charts of MAIN that the run has, the parts of a step and the shares of levels."""
    charts = []
    for key, (title, unit, _) in MAIN.items():
        points = points_of(run, key, unit)
        if not points[1] or _is_held_out(run, key):
            continue
        held_out = points_of(run, HELD_OUT + key, unit)
        if held_out[1]:
            curves = [Curve("training", points), Curve("held out", held_out, 1)]
        else:
            curves = with_mean(Curve(title, points))
        charts.append(_chart(key, curves))
    parts = [
        Curve(name, points, n)
        for n, (key, name) in enumerate(PARTS.items())
        if (points := run.metrics.points(key))[1]
    ]
    if len(parts) > 1:
        charts.append(Chart("Seconds of a step", parts, "s", from_zero=True))
    levels = [key for key in run.metrics.numeric_keys if key.startswith(LEVEL_SHARE)]
    shares = [
        Curve(f"level {key.removeprefix(LEVEL_SHARE)}", points_of(run, key, "%"), n)
        for n, key in enumerate(levels)
    ]
    if shares:
        charts.append(Chart("Share of each level in a step", shares, "%", from_zero=True))
    return charts


def shared_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of MAIN with a curve for each run that has the key."""
    if len(runs) == 1:
        return main(runs[0])
    charts = []
    for key, (_, unit, _) in MAIN.items():
        points = [points_of(run, key, unit) for run in runs]
        curves = [Curve(runs[n].name, p, n) for n, p in enumerate(points) if p[1]]
        if curves:
            charts.append(_chart(key, curves))
    return charts


def telemetry(run: Run) -> list[Chart]:
    return [
        Chart(title, [Curve(title, points)], unit, from_zero=from_zero)
        for key, (title, unit, from_zero) in TELEMETRY.items()
        if (points := points_of(run, key, unit))[1]
    ]


def others(run: Run) -> list[Folded]:
    """Return charts of every other key that changes, folded."""
    keys = run.metrics.numeric_keys
    drawn = {*MAIN, *TELEMETRY, *TITLES["not_drawn"], *(PARTS if "train_s" in keys else ())}
    charts = []
    for key in keys if not run_tables.rows_of(run) else ():
        if key not in drawn and not key.startswith(LEVEL_SHARE) and not _is_held_out(run, key):
            points = run.metrics.points(key)
            charts += [Chart(key, [Curve(key, points)])] if len(set(points[1])) > 1 else []
    return [Folded(f"{len(charts)} curve(s)", [Charts(charts)])] if charts else []


def _is_held_out(run: Run, key: str) -> bool:
    """Return whether a key is a held-out figure, drawn in the chart of its training figure."""
    trained = key.removeprefix(HELD_OUT)
    return trained != key and trained in MAIN and bool(run.metrics.points(trained)[1])


def as_phase(run: Run) -> lineage.Phase:
    """Return the facts of a run that a pipeline's tree needs."""
    trains = run.get("method", "kind") == "trainer"
    return lineage.make_phase(
        run.folder, run.get("model") or {}, trains, run.metrics.rows, run.result
    )


def phases(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of a pipeline.

    Steps continue from those already in the phase's model. Held-out accuracy is drawn along each
    lineage and by RAFT's cycles.
    """
    tree = [as_phase(run) for run in runs]
    axis = "step, counted from the pipeline's first model"
    trainings = [
        (n, run, lineage.steps_before(tree, phase))
        for n, (run, phase) in enumerate(zip(runs, tree, strict=True))
        if run.get("method", "kind") == "trainer"
    ]
    lines = lineage.lineages(tree)
    accuracies = [
        curve(
            "Held-out accuracy" if len(lines) == 1 else f"to {line[-1].name}",
            [(lineage.steps_before(tree, p), 100 * float(p.accuracy or 0.0)) for p in line],
            n,
            dots=len(line) == 1,
        )
        for n, line in enumerate(lines)
    ]
    charts = [Chart("Held-out accuracy", accuracies, "%", axis, True)]
    for key, (_, unit, _) in MAIN.items():
        curves = []
        for n, run, before in trainings:
            steps, values = points_of(run, key, unit)
            if values:
                curves.append(Curve(run.name, ([before + step for step in steps], values), n))
        if curves:
            charts.append(_chart(key, curves, axis))
    cycles = {name: points for name, points in lineage.cycles(tree).items() if len(points) > 1}
    by_cycle = [
        curve(name, [(cycle, 100 * accuracy) for cycle, accuracy in points], n)
        for n, (name, points) in enumerate(cycles.items())
    ]
    sampled = {run.name: run.result.get("pass_at_k") or {} for run in runs}
    pass_at_k = [
        curve(name, sorted((float(k), 100 * share) for k, share in by_k.items()), n)
        for n, (name, by_k) in enumerate(sampled.items())
        if by_k
    ]
    charts += [
        Chart("Held-out accuracy by RAFT's cycle", by_cycle, "%", "cycle", True),
        Chart("pass@k of each cycle's samples", pass_at_k, "%", "samples of a prompt, k", True),
        *_levels_by_cycle(runs),
    ]
    return [chart for chart in charts if chart.curves]


def _levels_by_cycle(runs: Sequence[Run]) -> list[Chart]:
    """Draw the share of each level in the prompts of RAFT's cycles, and its pass rate."""
    shares: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        sampling, groups = SAMPLED.fullmatch(run.folder.name), run.result.get("by_level") or {}
        if not sampling:
            continue
        cycle, raft = float(sampling[2]), f"{sampling[1]}, " if sampling[1] else ""
        whole = sum(group["num_prompts"] for group in groups.values()) or 1
        for level, group in groups.items():
            label = f"{raft}level {level}"
            shares.setdefault(label, []).append((cycle, 100 * group["num_prompts"] / whole))
            rates.setdefault(label, []).append((cycle, 100 * group["pass_rate"]))
    return [
        Chart(title, [curve(*line, n) for n, line in enumerate(points.items())], "%", "cycle", True)
        for title, points in {
            "Share of each level in a cycle's prompts": shares,
            "Pass rate of each level": rates,
        }.items()
        if len(points) > 1
    ]
