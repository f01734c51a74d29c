"""Summarize a pipeline's training: held-out scores as text, and curves in curves.png."""

from __future__ import annotations

from pathlib import Path

from launch.core import json_files
from launch.schema.plan import Plan
from launch.study import lineage

Points = list[tuple[int, float]]  # steps and values

# Metrics between 0 and 1 in metrics.jsonl, and the names of their curves.
CURVES = {"reward": "reward (training)", "mean_token_accuracy": "token accuracy (training)"}


def phases_of(plans: list[Plan]) -> list[lineage.Phase]:
    """Return the finished phases, in the order of `plans`."""
    return [
        lineage.read_phase(p.run_dir, vars(p.config.model), p.config.method.trains) for p in plans
    ]


def training_curves(plans: list[Plan], phases: list[lineage.Phase]) -> dict[str, Points]:
    """Return each training phase's curves by label. Steps continue from earlier training phases."""
    curves: dict[str, Points] = {}
    for plan, phase in zip(plans, phases, strict=True):
        rows = json_files.read_metrics(plan.run_dir / "metrics.jsonl")
        steps_before = lineage.steps_before(phases, phase)
        for metric, label in CURVES.items() if plan.config.method.trains else ():
            points = [
                (steps_before + row["step"], row[metric])
                for row in rows
                if isinstance(row.get(metric), (int, float))
            ]
            if points:
                curves[f"{phase.name} {label}"] = points
    return curves


def gain_lines(phases: list[lineage.Phase]) -> list[str]:
    """Return a line per evaluation, per lineage of three or more evaluations, and per RAFT."""
    lines = []
    for phase, before in lineage.gains(phases):
        text = f"{phase.name}: held-out {phase.measure} {phase.score:.1%}"
        if before:
            text += f", {lineage.gain_points(phase, before):+.1f} points on {before.name}"
        lines.append(text)
    for line in lineage.lineages(phases):
        if len(line) > 2:
            points = lineage.gain_points(line[-1], line[0])
            lines.append(f"{line[0].name} to {line[-1].name}: {points:+.1f} points")
    for name, cycles in lineage.cycles(phases).items():
        by_cycle = ", ".join(f"{cycle} {score:.1%}" for cycle, score in cycles)
        lines.append(f"{name} by cycle: {by_cycle}")
    return lines


def sampling_lines(plans: list[Plan]) -> list[str]:
    """Return a line per sampling phase, with the selected samples and the model's pass@k."""
    lines = []
    for plan in plans:
        result = json_files.read_json(plan.run_dir / "result.json") or {}
        if plan.config.method.leaves_samples and isinstance(result.get("pass_at_k"), dict):
            selection = f"{result['num_selected']:,} of {result['num_samples']:,} samples selected"
            curve = "  ".join(f"pass@{k} {value:.1%}" for k, value in result["pass_at_k"].items())
            lines.append(f"{plan.run_dir.name}: {selection}; {curve}")
    return lines


def summary(run_dir: Path, plans: list[Plan]) -> str:
    """Write curves.png, and return the text for the terminal."""
    phases = phases_of(plans)
    choices = [plan.chosen for plan in plans if plan.chosen]
    chosen = dict.fromkeys(choice.line() for choice in choices if choice.is_final)
    lines = [*gain_lines(phases), *chosen, *sampling_lines(plans)]
    if curves := training_curves(plans, phases):
        _draw(run_dir / "curves.png", curves, phases)
        lines.append(f"The curves are in {run_dir / 'curves.png'}")
    return "\n".join(lines)


def _draw(path: Path, curves: dict[str, Points], phases: list[lineage.Phase]) -> None:
    """Draw the curves, and the held-out scores of each lineage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
    for line in lineage.lineages(phases):
        points = [(lineage.steps_before(phases, p), p.score or 0.0) for p in line]
        label = f"held-out {line[-1].measure} to {line[-1].name}"
        axes.plot(*zip(*points, strict=True), marker="o", linestyle=":", zorder=3, label=label)
        for step, score in points:
            text, position = f"{score:.1%}", (step, score)
            axes.annotate(text, position, textcoords="offset points", xytext=(-8, 8), ha="right")
    title = path.parent.parent.name
    axes.set(ylim=(0, 1.02), xlabel="step, counted from the pipeline's first model", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
