"""Build the section of tests/gpu/learning.py: accuracy by method and seed, gains, and curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.reports import paired

Row = dict[str, Any]
# Modes of GRPO that are compared with the synchronous one -> topology.overlap
MODES = {"overlap": "true", "stream": "stream"}
GRPO = ("grpo", *MODES)
# method -> prefix of the names of its phases. RAFT's first evaluation is that of the SFT.
METHODS = {
    "sft": "raft_cycle0_evaluate",
    "raft": "raft_",
    "grpo": "grpo",
    **{mode: mode for mode in MODES},
    "dpo": "dpo",
}
TITLES = {
    "sft": "SFT",
    "raft": "RAFT",
    "grpo": "GRPO",
    "overlap": "GRPO, overlapping",
    "stream": "GRPO, streaming",
    "dpo": "DPO",
}
SHARES = (0.25, 0.5, 0.75, 1.0)  # shares of the samples at which modes are compared
SMOOTHED = 0.05  # share of the steps over which rewards are averaged
REACHED = 0.9  # share of synchronous GRPO's final reward
WANTED = {"raft": 15.0, "grpo": 15.0}  # required gain over the SFT in percentage points
# Number of seeds -> Student's t for a two-sided 95% interval (one degree of freedom less).
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def report(rows: Sequence[Row], folder: Path) -> str:
    """Return the section in Markdown, and write its plots to `folder`/learning_<start>*.png."""
    if not rows:
        return "Nothing is measured yet: docs/learning.md says how."
    names = sorted({row["hardware"].upper() for row in rows})
    versions = sorted(
        {f"{name} {version}" for row in rows for name, version in row["packages"].items()}
    )
    commits = sorted({str(row["commit"])[:7] for row in rows})
    lines = [
        f"{', '.join(names)}; {', '.join(versions)}; commit {', '.join(commits)}. Greedy accuracy "
        "on held-out problems. Gains over each seed's own SFT, with Student's 95% interval."
    ]
    if any(row["smoke"] for row in rows):
        lines += [
            "",
            "**smoke=true: a model of a hundred thousand parameters after two steps. It says only "
            "that all of it runs.**",
        ]
    for start in sorted({row["start"] for row in rows}):
        own = [row for row in rows if row["start"] == start]
        lines += ["", f"## {start}", "", f"    {command(own)}", "", *table(own), ""]
        lines += [" ".join([*verdicts(own), *gap(own)]), *modes(own)]
        if plot_modes(own, folder / f"learning_{start}_modes.png"):
            lines += ["", f"![reward against time](learning_{start}_modes.png)"]
        if plot(own, folder / f"learning_{start}.png"):
            lines += ["", f"![reward and accuracy](learning_{start}.png)"]
    return "\n".join(lines)


def command(rows: Sequence[Row]) -> str:
    """Return the command that measured these rows, which have the same start."""
    gpus = 1 if any(row.get("gpus") == 1 for row in rows) else 2
    start = rows[0]["start"]
    weights = f" --smollm2 models/{start}" if start == "smollm2_135m" else ""
    return (
        f"python tests/gpu/learning.py measure hardware={rows[0]['hardware']} --gpus {gpus} --only "
        f"{start}-{weights}"
    )


def table(rows: Sequence[Row]) -> list[str]:
    seeds = sorted({row["seed"] for row in rows})
    columns = [*(f"seed {seed}" for seed in seeds), "mean", "gained, points", "samples"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for method in METHODS:
        own = {row["seed"]: row for row in rows if row["method"] == method}
        if not own:
            continue
        cells = [f"{own[seed]['accuracy']:.1%}" if seed in own else "not run" for seed in seeds]
        cells.append(f"{statistics.mean(row['accuracy'] for row in own.values()):.1%}")
        cells.append(gained(gains(rows, method)))
        samples = sorted({f"{row['samples']:,}" for row in own.values() if "samples" in row})
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} | {', '.join(samples)} |")
    return lines


def gains(rows: Sequence[Row], method: str) -> dict[int, paired.Comparison]:
    """Compare a method with the SFT of each seed.

    Seeds are left out if a row is missing or the rows have different problems.
    """
    if method == "sft":
        return {}
    before = {row["seed"]: row for row in rows if row["method"] == "sft"}
    comparisons = {}
    for row in rows:
        first = before.get(row["seed"])
        if (
            row["method"] == method
            and first is not None
            and first["data_sha256"] == row["data_sha256"]
        ):
            comparisons[row["seed"]] = paired.compare(counts(first), counts(row))
    return dict(sorted(comparisons.items()))


def counts(row: Row) -> list[tuple[int, int]]:
    return [(int(right), 1) for right in row["right"]]


def gained(by_seed: dict[int, paired.Comparison]) -> str:
    """Format the mean gain of the seeds with its 95% interval by Student's t.

    For a single seed, the interval is that of its paired differences.
    """
    if not by_seed:
        return ""
    points = [100 * comparison.difference for comparison in by_seed.values()]
    if len(points) == 1:
        (one,) = by_seed.values()
        return f"{points[0]:+.1f} ({100 * one.low:+.1f} to {100 * one.high:+.1f}, one seed)"
    low, high = interval(points)
    return f"{statistics.mean(points):+.1f} ({low:+.1f} to {high:+.1f})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of two or more values, by Student's t.

    More than five values use the t of five, so the interval is slightly too wide.
    """
    half = T[min(len(values), max(T))] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def verdicts(rows: Sequence[Row]) -> list[str]:
    lines = []
    for method, wanted in WANTED.items():
        points = [100 * comparison.difference for comparison in gains(rows, method).values()]
        if points:
            reached = "reached" if statistics.mean(points) >= wanted else "missed"
            lines.append(f"{TITLES[method]} {reached} its target of {wanted:g} points.")
    return lines


def gap(rows: Sequence[Row]) -> list[str]:
    """Return a line on the difference between the trainer's and the server's log-probabilities."""
    gaps = [row["logp_gap"] for row in rows if row["method"] == "grpo" and "logp_gap" in row]
    if not gaps:
        return []
    gpus = {1: "shared one GPU", 2: "had a GPU each"}
    where = sorted({gpus[row["gpus"]] for row in rows if "logp_gap" in row})
    sizes, largest = zip(*gaps, strict=True)
    return [
        f"GRPO's server and trainer {' or '.join(where)}; their log-probabilities differed by "
        f"{statistics.mean(sizes):.4f} on average, {max(largest):.3f} at most."
    ]


def smoothed(row: Row) -> list[float]:
    """Return the moving average of the rewards over the share SMOOTHED of the steps."""
    rewards = [reward for _, reward in row["rewards"]]
    width = max(1, round(SMOOTHED * len(rewards)))
    return [
        statistics.mean(rewards[max(0, end - width) : end]) for end in range(1, len(rewards) + 1)
    ]


def modes(rows: Sequence[Row]) -> list[str]:
    """Compare the rewards of GRPO's modes at equal samples, for the seeds that all modes have.

    A mode agrees if its mean differs from that of the synchronous mode by no more than two seeds of
    the synchronous mode do.
    """
    methods = [method for method in GRPO if any(row["method"] == method for row in rows)]
    runs = {(row["method"], row["seed"]): row for row in rows if row["method"] in methods}
    curves = {key: smoothed(row) for key, row in runs.items()}
    seeds = sorted(
        {seed for _, seed in curves if all((method, seed) in curves for method in methods)}
    )
    if len(methods) < 2 or not seeds:
        return []
    lines = [
        "",
        f"Rewards at equal samples, the mean of {len(seeds)} seed(s), and samples to "
        f"{REACHED:.0%} of the last synchronous reward:",
        "",
        "| | " + " | ".join(f"{share:.0%}" for share in SHARES) + " | samples | agrees |",
        "|---" * (len(SHARES) + 3) + "|",
    ]
    at = {
        method: [
            [curves[method, seed][round(share * len(curves[method, seed])) - 1] for seed in seeds]
            for share in SHARES
        ]
        for method in methods
    }
    spreads = [max(values) - min(values) for values in at["grpo"]]
    for method in methods:
        means = [statistics.mean(values) for values in at[method]]
        apart = [
            abs(mean - statistics.mean(values))
            for mean, values in zip(means, at["grpo"], strict=True)
        ]
        agrees = all(one <= spread for one, spread in zip(apart, spreads, strict=True))
        samples = [samples_to(runs[method, seed], runs["grpo", seed]) for seed in seeds]
        cells = [f"{mean:.3f}" for mean in means]
        cells.append(
            "not reached" if None in samples else f"{statistics.mean(filter(None, samples)):,.0f}"
        )
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} | {'yes' if agrees else 'no'} |")
    lines.append(
        "| two seeds of GRPO differ by | "
        + " | ".join(f"{spread:.3f}" for spread in spreads)
        + " | | |"
    )
    return lines


def samples_to(row: Row, synchronous: Row) -> float | None:
    """Return the samples until the share REACHED of the final synchronous reward, or None."""
    curve, wanted = smoothed(row), REACHED * smoothed(synchronous)[-1]
    step = next((number for number, reward in enumerate(curve, 1) if reward >= wanted), None)
    return None if step is None else row["samples"] * step / len(curve)


def plot_modes(rows: Sequence[Row], path: Path) -> bool:
    """Plot GRPO's reward against time, with a color for each mode and a line for each seed.

    Return False, without a plot, if only the synchronous mode was run.
    """
    rows = [row for row in rows if "time_s" in row]
    if not any(row["method"] in MODES for row in rows):
        return False
    figure, (axes,) = canvas(7, 1)
    for number, method in enumerate(GRPO):
        for first, row in enumerate(row for row in rows if row["method"] == method):
            minutes = [second / 60 for second in row["time_s"]]
            label = None if first else TITLES[method]
            axes.plot(minutes, smoothed(row), color=f"C{number}", linewidth=1, label=label)
    axes.set(xlabel="minutes", title="reward of the samples", ylim=(0, 1.02))
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)
    return True


def canvas(width: float, columns: int) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.3)
    return figure, list(axes)


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Plot GRPO's reward by step and RAFT's accuracy by cycle, with a line for each seed.

    Return False, without a plot, if RAFT was not run.
    """
    rows = sorted(rows, key=lambda row: row["seed"])
    grpo = [row for row in rows if row["method"] == "grpo"]
    raft = [row for row in rows if "cycles" in row]
    if not raft:
        return False
    figure, (left, right) = canvas(10, 2)
    for row in grpo:
        left.plot(*zip(*row["rewards"], strict=True), linewidth=1, label=f"seed {row['seed']}")
    for row in raft:
        right.plot(
            range(len(row["cycles"])), row["cycles"], marker="o", label=f"seed {row['seed']}"
        )
    left.set(xlabel="step", title="GRPO: reward of the samples", ylim=(0, 1.02))
    right.set(xlabel="cycle", title="RAFT: held-out accuracy", ylim=(0, 1.02))
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes, drawn in ((left, grpo), (right, raft)):
        if drawn:
            axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)
    return True
