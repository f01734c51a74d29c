"""Which keys of metrics.jsonl are drawn, in which charts, under which names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from launch.pipelines import lineage
from launch.reports import tables
from launch.reports.curves import Chart, Curve, with_mean
from launch.reports.data import Points, Run, dig, is_number, table
from launch.reports.parts import number

# key -> (title, unit, whether the axis begins at 0), in the order of a page. A unit of % is of a share, drawn a hundredfold.
MAIN = {
    "loss": ("Loss", "", False),
    "reward": ("Reward", "", False),
    "accuracy": ("Accuracy", "%", True),
    "mean_token_accuracy": ("Token accuracy (training)", "%", True),
    "rewards/accuracies": ("Accuracy of rewards (chosen over rejected)", "%", True),
    "rewards/margins": ("Margin of rewards", "", False),
    "kl": ("KL from the reference", "", False),
    "sampling/importance_sampling_ratio/mean": ("Importance ratio, trainer over generator", "", False),
    "clip_ratio/region_mean": ("Tokens whose ratio is clipped", "%", True),
    "staleness/mean": ("Staleness of completions", "steps", True),
    "eval_loss": ("Loss (held out)", "", False),
    "tokens_per_second": ("Tokens per second", "tokens/s", True),
    "mfu": ("MFU", "%", True),
    "memory_peak_gb": ("Memory, most so far", "GB", True),
}
HELD_OUT = "eval_"  # before a key: the same figure of held-out rows, drawn beside that of training
LEVEL_SHARE = "level_share/"  # of a curriculum, one key a level
SAMPLED = re.compile(r"\d+_(?:(.+)_)?cycle(\d+)_sample")  # as launch/pipelines/cycles.py names the phases of RAFT that sample
PARTS = {"step_s": "whole step", **tables.STEP, "server_s": "the server's generation"}
TELEMETRY = {
    "gpu_utilization": ("GPU utilization", "%"),
    "gpu_memory_used_gb": ("GPU memory in use", "GB"),
    "gpu_gtt_used_gb": ("GTT in use (system memory)", "GB"),
    "gpu_memory_fragmentation": ("Memory held and unused (fragmentation)", "%"),
    "gpu_memory_bandwidth_share": ("Memory bandwidth, share of the peak", "%"),
    "gpu_power_w": ("Power", "W"),
    "gpu_temperature_c": ("Temperature", "°C"),
    "gpu_clock_mhz": ("Clock", "MHz"),
    "gpu_memory_clock_mhz": ("Memory clock", "MHz"),
}
# No curves of the run: what they are drawn over, or what another curve says.
NOT_DRAWN = {"step", "num_steps", "time_s", "num_tokens", "tokens_per_second_per_gpu"}


def points_of(run: Run, key: str, unit: str) -> Points:
    steps, values = tables.logged(run, key)
    return steps, [100 * value for value in values] if unit == "%" else values


def main(run: Run) -> list[Chart]:
    """Those of MAIN that the run has, and the parts of a step where generation is timed."""
    return together([run])


def together(runs: Sequence[Run]) -> list[Chart]:
    """The charts of MAIN with a curve for each run that has the key; a single run's carry no label but beside held-out rows."""
    charts = []
    for key, (title, unit, from_zero) in MAIN.items():
        found = [(n, points_of(run, key, unit)) for n, run in enumerate(runs)]
        curves = [Curve(runs[n].name if len(runs) > 1 else title, points, n) for n, points in found if points[1]]
        if len(runs) == 1 and curves and _is_beside(runs[0], key):
            continue
        if len(runs) == 1 and curves and (held_out := points_of(runs[0], HELD_OUT + key, unit))[1]:
            beside = [replace(curves[0], label="training"), Curve("held out", held_out, 1)]
            charts.append(Chart(_file(key), title, beside, unit, from_zero=from_zero))
        elif curves:
            charts.append(Chart(_file(key), title, with_mean(curves[0]) if len(runs) == 1 else curves, unit, from_zero=from_zero))
    if len(runs) == 1:
        parts = [Curve(name, points, n) for n, (key, name) in enumerate(PARTS.items()) if (points := runs[0].metrics.points(key))[1]]
        if len(parts) > 1:
            charts.append(Chart("step-parts", "Seconds of a step", parts, "s", from_zero=True))
        levels = [key for key in runs[0].metrics.numeric_keys if key.startswith(LEVEL_SHARE)]
        shares = [Curve(f"level {key.removeprefix(LEVEL_SHARE)}", points_of(runs[0], key, "%"), n) for n, key in enumerate(levels)]
        if shares:
            charts.append(Chart("level-shares", "Share of each level in a step", shares, "%", from_zero=True))
    return charts


def telemetry(run: Run) -> list[Chart]:
    found = ((key, title, unit, points_of(run, key, unit)) for key, (title, unit) in TELEMETRY.items())
    return [Chart(_file(key), title, [Curve(title, points)], unit, from_zero=True) for key, title, unit, points in found if points[1]]


def others(run: Run) -> tuple[list[Chart], dict[str, float]]:
    """(charts of every other key, those that never change with their value)."""
    if tables.rows_of(run):
        return [], {}
    known = {*MAIN, *TELEMETRY, *NOT_DRAWN, *(PARTS if "train_s" in run.metrics.numeric_keys else ())}
    known |= {key for key in run.metrics.numeric_keys if key.startswith(LEVEL_SHARE) or _is_beside(run, key)}
    charts, constant = [], {}
    for key in run.metrics.numeric_keys:
        if key in known:
            continue
        points = run.metrics.points(key)
        if len(set(points[1])) == 1:
            constant[key] = points[1][0]
        else:
            charts.append(Chart(_file(key), key, [Curve(key, points)]))
    return charts, constant


def as_phase(run: Run) -> lineage.Phase:
    """What of a run its pipeline's tree is made of."""
    trains, accuracy = run.get("method", "kind") == "trainer", run.result.get("accuracy")
    steps = max((int(row["step"]) for row in run.metrics.rows[-1:]), default=0) if trains else 0
    evaluated = float(accuracy) if is_number(accuracy) and not trains else None
    begun_with = next((str(name) for key in ("path", "hub_id", "name") if (name := run.get("model", key))), None)
    return lineage.Phase(run.folder, begun_with, steps, evaluated, run.result.get("data_sha256"))


def phases(runs: Sequence[Run]) -> list[Chart]:
    """The curves of a pipeline, each phase's steps counted on from those that its model had behind it; its held-out accuracy along each
    lineage, and by RAFT's cycles."""
    tree = [as_phase(run) for run in runs]
    curves: dict[str, list[Curve]] = {}
    for n, (run, phase) in enumerate(zip(runs, tree, strict=True)):
        if run.get("method", "kind") != "trainer":
            continue
        before = lineage.steps_before(tree, phase)
        for key in MAIN:
            steps, values = points_of(run, key, MAIN[key][1])
            if values:
                curves.setdefault(key, []).append(Curve(run.name, ([before + s for s in steps], values), n))
    axis = "step, counted from the pipeline's first model"
    charts = [
        Chart(_file(k), MAIN[k][0], c, MAIN[k][1], axis, MAIN[k][2]) for k, c in sorted(curves.items(), key=lambda i: [*MAIN].index(i[0]))
    ]
    return [*_accuracies(tree, axis), *charts, *pass_at_k(runs), *levels_by_cycle(runs)]


def _accuracies(tree: Sequence[lineage.Phase], axis: str) -> list[Chart]:
    lines = lineage.lines(tree)
    if not lines:
        return []
    curves = []
    for n, line in enumerate(lines):
        points = [float(lineage.steps_before(tree, phase)) for phase in line], [100 * float(phase.accuracy or 0.0) for phase in line]
        label = "Held-out accuracy" if len(lines) == 1 else f"to {line[-1].name}"
        curves.append(Curve(label, points, n, dots=len(line) == 1))
    charts = [Chart("held-out-accuracy", "Held-out accuracy", curves, "%", axis, True)]
    cycles = {name: points for name, points in lineage.cycles(tree).items() if len(points) > 1}
    by_cycle = [
        Curve(name, ([float(c) for c, _ in points], [100 * value for _, value in points]), n)
        for n, (name, points) in enumerate(cycles.items())
    ]
    return [*charts, *([Chart("accuracy-by-cycle", "Held-out accuracy by RAFT's cycle", by_cycle, "%", "cycle", True)] if by_cycle else [])]


def pass_at_k(runs: Sequence[Run]) -> list[Chart]:
    """Of the phases that sampled: the chance that one of k samples is right, a curve for each."""
    curves: list[Curve] = []
    for run in runs:
        found = run.result.get("pass_at_k") if run.get("method", "name") == "sample" else None
        points = sorted((float(k), 100 * float(v)) for k, v in found.items()) if isinstance(found, dict) else []
        if points:
            curves.append(Curve(run.name, ([k for k, _ in points], [v for _, v in points]), len(curves)))
    return [Chart("pass-at-k", "pass@k of each cycle's samples", curves, "%", "samples of a prompt, k", True)] if curves else []


def levels_by_cycle(runs: Sequence[Run]) -> list[Chart]:
    """Of RAFT's cycles, where their prompts are of several levels: how many are of each, and how many of their samples were right."""
    cycles: dict[str, list[tuple[float, dict[str, dict[str, float]]]]] = {}
    for run in runs:
        named, groups = SAMPLED.fullmatch(run.folder.name), table(run.result.get("by_level"))
        if named and groups and all(is_number(dig(g, key)) for g in groups.values() for key in ("num_prompts", "pass_rate")):
            cycles.setdefault(named.group(1) or "raft", []).append((float(named.group(2)), groups))
    shares: list[Curve] = []
    rates: list[Curve] = []
    for name, found in cycles.items():
        levels = sorted({level for _, groups in found for level in groups}, key=lambda level: (len(level), level))
        for n, level in enumerate(levels if len(levels) > 1 else []):
            label = f"level {level}" if len(cycles) == 1 else f"{name}, level {level}"
            of_level = [
                (groups.get(level, {}).get("num_prompts", 0), sum(g["num_prompts"] for g in groups.values())) for _, groups in found
            ]
            drawn = [100 * part / (whole or 1) for part, whole in of_level]
            shares.append(Curve(label, ([cycle for cycle, _ in found], drawn), n))
            right = [(cycle, 100 * groups[level]["pass_rate"]) for cycle, groups in found if level in groups]
            rates.append(Curve(label, ([cycle for cycle, _ in right], [rate for _, rate in right]), n))
    charts = {
        "level-shares-by-cycle": ("Share of each level in a cycle's prompts", shares),
        "pass-rates": ("Pass rate of each level", rates),
    }
    return [Chart(file, title, curves, "%", "cycle", True) for file, (title, curves) in charts.items() if curves]


def _is_beside(run: Run, key: str) -> bool:
    """Whether a held-out figure is drawn in the chart of training's."""
    return key.startswith(HELD_OUT) and key.removeprefix(HELD_OUT) in MAIN and bool(run.metrics.points(key.removeprefix(HELD_OUT))[1])


def mean_of(chart: Chart) -> str:
    values = chart.curves[0].points[1]
    return f"{number(sum(values) / len(values))} {chart.unit}".strip()


def _file(key: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
