"""What a pipeline learned: held-out accuracy after each phase, and the curves in between, in the terminal and as curves.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import rundir, show
from launch.plan import Plan
from launch.schema import Config

# metric of metrics.jsonl -> what the curve is called; each lies between 0 and 1
CURVES = {"reward": "reward (training)", "mean_token_accuracy": "token accuracy (training)"}


def gather(plans: list[Plan]) -> tuple[dict[str, tuple[list[int], list[float]]], list[tuple[str, int, float]]]:
    """(curve -> steps and values, [(phase, step, held-out accuracy)]) over the steps of all phases, counted through."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    accuracies: list[tuple[str, int, float]] = []
    before = 0
    for plan in plans:
        rows = rundir.read_metrics(plan.run_dir / "metrics.jsonl")
        result: dict[str, Any] = rundir.read_json(plan.run_dir / "result.json") or {}
        if plan.config.method.kind != "trainer":
            if isinstance(result.get("accuracy"), float):
                accuracies.append((plan.run_dir.name, before, result["accuracy"]))
            continue
        for metric, label in CURVES.items():
            points = [(before + row["step"], row[metric]) for row in rows if isinstance(row.get(metric), (int, float))]
            if points:
                steps, values = curves.setdefault(f"{plan.config.method.name} {label}", ([], []))
                steps += [step for step, _ in points]
                values += [value for _, value in points]
        before += int(rows[-1]["step"]) if rows else 0
    return curves, accuracies


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
    curves, accuracies = gather(plans)
    lines = [f"{name}: held-out accuracy {value:.1%}" for name, _, value in accuracies]
    # Each on the first one, as in reports: phases may be alternatives to one another, so that the last is not what all came to.
    lines[1:] = [
        f"{line}, {100 * (value - accuracies[0][2]):+.1f} points on the first"
        for line, (_, _, value) in zip(lines[1:], accuracies[1:], strict=True)
    ]
    lines += sampled(plans)
    if not curves:
        return "\n".join(lines)
    _png(run_dir / "curves.png", curves, accuracies)
    return "\n".join([_terminal(curves, accuracies), *lines, f"The plot is in {run_dir / 'curves.png'}"])


def show_end(config: Config, run_dir: Path, plans: list[Plan]) -> None:
    show.say(config, show_all(run_dir, plans))


def _terminal(curves: dict[str, tuple[list[int], list[float]]], accuracies: list[tuple[str, int, float]]) -> str:
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(90, 20)
    for label, (steps, values) in curves.items():
        figure.draw(figure.signal(steps, values, marker="braille").lines().label(label))
    figure.draw(figure.signal([s for _, s, _ in accuracies], [v for _, _, v in accuracies], marker="●").label("held-out accuracy"))
    figure.ruler("y").lim(0, 1)
    return str(plotext.uncolorize(str(figure.build())))


def _png(path: Path, curves: dict[str, tuple[list[int], list[float]]], accuracies: list[tuple[str, int, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, (steps, values) in curves.items():
        axes.plot(steps, values, label=label, linewidth=1.2)
    axes.scatter([s for _, s, _ in accuracies], [v for _, _, v in accuracies], color="black", zorder=3, label="held-out accuracy")
    for _, step, value in accuracies:
        axes.annotate(f"{value:.1%}", (step, value), textcoords="offset points", xytext=(-8, 8), ha="right")
    axes.set(ylim=(0, 1.02), xlabel="step, counted through all phases", title=path.parent.parent.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
