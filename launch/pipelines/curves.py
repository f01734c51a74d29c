"""What a pipeline learned: held-out accuracy after each phase, and the curves in between, in the terminal and as curves.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import show
from launch.files import rundir
from launch.pipelines import lineage
from launch.plan import Plan
from launch.schema import Config

Points = tuple[list[int], list[float]]  # steps and values

# metric of metrics.jsonl -> what the curve is called; each lies between 0 and 1
CURVES = {"reward": "reward (training)", "mean_token_accuracy": "token accuracy (training)"}


def phases_of(plans: list[Plan]) -> list[lineage.Phase]:
    """The phases as they ended, in the order of `plans`."""
    found = []
    for plan in plans:
        result: dict[str, Any] = rundir.read_json(plan.run_dir / "result.json") or {}
        rows = rundir.read_metrics(plan.run_dir / "metrics.jsonl")
        trains, model, accuracy = plan.config.method.kind == "trainer", plan.config.model, result.get("accuracy")
        steps = int(rows[-1]["step"]) if trains and rows else 0
        evaluated = accuracy if isinstance(accuracy, float) and not trains else None
        begun_with = model.path or model.hub_id or model.name
        found.append(lineage.Phase(plan.run_dir, begun_with, steps, evaluated, result.get("data_sha256")))
    return found


def gather(plans: list[Plan], phases: list[lineage.Phase]) -> dict[str, Points]:
    """Curve -> steps and values over all phases. Steps are counted on from those that the phase's model had behind it."""
    curves: dict[str, Points] = {}
    for plan, phase in zip(plans, phases, strict=True):
        if plan.config.method.kind != "trainer":
            continue
        rows, before = rundir.read_metrics(plan.run_dir / "metrics.jsonl"), lineage.steps_before(phases, phase)
        for metric, label in CURVES.items():
            points = [(before + row["step"], row[metric]) for row in rows if isinstance(row.get(metric), (int, float))]
            if not points:
                continue
            name = f"{plan.config.method.name} {label}"
            if name in curves and points[0][0] <= curves[name][0][-1]:  # another branch
                name = f"{phase.name} {label}"
            steps, values = curves.setdefault(name, ([], []))
            steps += [step for step, _ in points]
            values += [value for _, value in points]
    return curves


def accuracies(phases: list[lineage.Phase]) -> dict[str, Points]:
    """The held-out accuracy along each lineage: its last evaluation -> steps and accuracies."""
    found = {}
    for line in lineage.lines(phases):
        steps = [lineage.steps_before(phases, phase) for phase in line]
        found[line[-1].name] = (steps, [float(phase.accuracy or 0.0) for phase in line])
    return found


def gained(phases: list[lineage.Phase]) -> list[str]:
    """A line for each evaluation, one for each lineage of more than two, and one for the cycles of each RAFT."""
    said = []
    for gain in lineage.gains(phases):
        on = f", {gain.points:+.1f} points on {gain.before.name}" if gain.before is not None else ""
        said.append(f"{gain.phase.name}: held-out accuracy {gain.phase.accuracy:.1%}{on}")
    for line in lineage.lines(phases):
        if len(line) > 2:
            whole = lineage.Gain(line[-1], line[0]).points
            said.append(f"{line[0].name} to {line[-1].name}: {whole:+.1f} points")
    for name, cycles in lineage.cycles(phases).items():
        said.append(f"{name} by cycle: " + ", ".join(f"{cycle} {value:.1%}" for cycle, value in cycles))
    return said


def sampled(plans: list[Plan]) -> list[str]:
    """A line for each phase that sampled: how many samples it kept, and pass@k of the model that it sampled."""
    lines = []
    for plan in plans:
        result: dict[str, Any] = rundir.read_json(plan.run_dir / "result.json") or {}
        if plan.config.method.name == "sample" and isinstance(result.get("pass_at_k"), dict):
            curve = "  ".join(f"pass@{k} {value:.1%}" for k, value in result["pass_at_k"].items())
            lines.append(f"{plan.run_dir.name}: {result['num_selected']:,} of {result['num_samples']:,} samples kept; {curve}")
    return lines


def show_all(run_dir: Path, plans: list[Plan]) -> str:
    """The terminal's text; curves.png is written beside it."""
    phases = phases_of(plans)
    curves, evaluated = gather(plans, phases), accuracies(phases)
    choices = dict.fromkeys(plan.chosen.choice.said() for plan in plans if plan.chosen and plan.chosen.choice.is_made)
    lines = [*gained(phases), *choices, *sampled(plans)]
    if not curves:
        return "\n".join(lines)
    _png(run_dir / "curves.png", curves, evaluated)
    return "\n".join([_terminal(curves, evaluated), *lines, f"The plot is in {run_dir / 'curves.png'}"])


def show_end(config: Config, run_dir: Path, plans: list[Plan]) -> None:
    show.say(config, show_all(run_dir, plans))


def _label(name: str, evaluated: dict[str, Points]) -> str:
    return "held-out accuracy" + (f" to {name}" if len(evaluated) > 1 else "")


def _terminal(curves: dict[str, Points], evaluated: dict[str, Points]) -> str:
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(90, 20)
    for label, (steps, values) in curves.items():
        figure.draw(figure.signal(steps, values, marker="braille").lines().label(label))
    for name, (steps, values) in evaluated.items():
        figure.draw(figure.signal(steps, values, marker="●").label(_label(name, evaluated)))
    figure.ruler("y").lim(0, 1)
    return str(plotext.uncolorize(str(figure.build())))


def _png(path: Path, curves: dict[str, Points], evaluated: dict[str, Points]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, (steps, values) in curves.items():
        axes.plot(steps, values, label=label, linewidth=1.2)
    for name, (steps, values) in evaluated.items():
        colour = "black" if len(evaluated) == 1 else None
        axes.plot(steps, values, marker="o", linestyle=":", zorder=3, label=_label(name, evaluated), color=colour)
        for step, value in zip(steps, values, strict=True):
            axes.annotate(f"{value:.1%}", (step, value), textcoords="offset points", xytext=(-8, 8), ha="right")
    axes.set(ylim=(0, 1.02), xlabel="step, counted from the pipeline's first model", title=path.parent.parent.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
