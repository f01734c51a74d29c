"""The page of tests/gpu/learning.py: accuracy of each method and seed, what it adds to the SFT, and curves. Pure but for the plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.reports import paired

Row = dict[str, Any]
# method -> what the names of its phases begin with; the first evaluation of RAFT is that of the SFT
METHODS = {"sft": "raft_cycle0_evaluate", "raft": "raft_", "grpo": "grpo", "dpo": "dpo"}
TITLES = {"sft": "SFT", "raft": "RAFT", "grpo": "GRPO", "dpo": "DPO"}
WANTED = {"raft": 15.0, "grpo": 15.0}  # points over the SFT
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95% of Student's t, by the number of seeds: of one degree of freedom less


def report(rows: Sequence[Row], folder: Path) -> str:
    """Markdown. Writes `folder`/learning_<start>.png of every start that has rows of RAFT or GRPO."""
    lines = ["# What each method learned, measured", ""]
    if not rows:
        return "\n".join([*lines, "Nothing is measured yet: docs/learning.md says how.", ""])
    names = sorted({row["hardware"] for row in rows})
    versions = sorted({f"{name} {version}" for row in rows for name, version in row["packages"].items()})
    commits = sorted({str(row["commit"])[:12] for row in rows})
    lines += [f"On {', '.join(names)}, with {', '.join(versions)}; commit {', '.join(commits)}."]
    lines += ["Greedy accuracy on held-out problems, the same for all, with Wilson's 95% interval; gains are pairwise over the problems."]
    lines += ["RAFT, GRPO and DPO start from their seed's SFT."]
    if any(row["smoke"] for row in rows):
        lines += ["", "**smoke=true: a model of a hundred thousand parameters after two steps. It says only that all of it runs.**"]
    for start in sorted({row["start"] for row in rows}):
        own = [row for row in rows if row["start"] == start]
        lines += ["", f"## {start}", "", f"    {command(own)}", "", *table(own), "", *verdicts(own), *gap(own), "", *levels(own)]
        if plot(own, folder / f"learning_{start}.png"):
            lines += ["", f"![reward and accuracy](learning_{start}.png)"]
    return "\n".join([*lines, ""])


def command(rows: Sequence[Row]) -> str:
    """That measured the rows of a start."""
    gpus = 1 if any(row.get("gpus") == 1 for row in rows) else 2
    start = rows[0]["start"]
    weights = f" --smollm2 models/{start}" if start == "smollm2_135m" else ""
    return f"python tests/gpu/learning.py measure hardware={rows[0]['hardware']} --gpus {gpus} --only {start}-{weights}"


def table(rows: Sequence[Row]) -> list[str]:
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        "| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | gained, points | samples |",
        "|---" * (len(seeds) + 4) + "|",
    ]
    for method in METHODS:
        own = {row["seed"]: row for row in rows if row["method"] == method}
        cells = [f"{own[s]['accuracy']:.1%} ({shown(own[s]['interval'])})" if s in own else "not run" for s in seeds]
        mean = f"{statistics.mean(row['accuracy'] for row in own.values()):.1%}" if own else ""
        samples = ", ".join(sorted({f"{row['samples']:,}" for row in own.values() if "samples" in row}))
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} | {mean} | {gained(gains(rows, method))} | {samples} |")
    return lines


def gains(rows: Sequence[Row], method: str) -> dict[int, paired.Comparison]:
    """By seed, over the SFT of that seed; seeds that lack one of the two, or were asked other problems, are not in it."""
    if method == "sft":
        return {}
    before = {row["seed"]: row for row in rows if row["method"] == "sft"}
    found = {}
    for row in rows:
        first = before.get(row["seed"])
        if row["method"] == method and first is not None and first["data_sha256"] == row["data_sha256"]:
            found[row["seed"]] = paired.compare(counts(first), counts(row))
    return dict(sorted(found.items()))


def counts(row: Row) -> list[tuple[int, int]]:
    return [(int(right), 1) for right in row["right"]]


def gained(found: dict[int, paired.Comparison]) -> str:
    """The mean of the seeds with its 95% interval by Student's t; of one seed the interval of its paired differences."""
    if not found:
        return ""
    points = [100 * one.difference for one in found.values()]
    if len(points) == 1:
        (one,) = found.values()
        return f"{points[0]:+.1f} ({100 * one.low:+.1f} to {100 * one.high:+.1f}, one seed)"
    low, high = interval(points)
    return f"{statistics.mean(points):+.1f} ({low:+.1f} to {high:+.1f}); " + ", ".join(f"{value:+.1f}" for value in points)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% of the mean of two values or more, by Student's t; of more than five seeds by that of five, which is a little wide."""
    half = T[min(len(values), max(T))] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def verdicts(rows: Sequence[Row]) -> list[str]:
    lines = []
    for method, wanted in WANTED.items():
        points = [100 * one.difference for one in gains(rows, method).values()]
        if points:
            mean = statistics.mean(points)
            reached = "reached" if mean >= wanted else "missed"
            lines.append(f"{TITLES[method]}: {wanted:g} points were wanted, {reached} with {mean:+.1f} over {len(points)} seed(s).  ")
    return lines


def gap(rows: Sequence[Row]) -> list[str]:
    """Of GRPO: how far the trainer's log-probability of a sampled token is from the server's."""
    found = [f"seed {row['seed']} {row['logp_gap'][0]:.4f} (at most {row['logp_gap'][1]:.3f})" for row in rows if "logp_gap" in row]
    gpus = {1: "shared one GPU", 2: "had a GPU each"}
    where = sorted({gpus[row["gpus"]] for row in rows if "logp_gap" in row})
    said = (
        f"GRPO's server and trainer {' or '.join(where)}. The trainer's log-probability of a sampled token less the server's, mean size: "
    )
    return [f"{said}{', '.join(sorted(found))}.  "] if found else []


def levels(rows: Sequence[Row]) -> list[str]:
    """Accuracy by level, the mean of the seeds."""
    names = sorted({level for row in rows for level in row["by_level"]})
    lines = ["| by level | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for method in METHODS:
        own = [row["by_level"] for row in rows if row["method"] == method]
        if own:
            means = [statistics.mean(one[name] for one in own) for name in names]
            lines.append(f"| {TITLES[method]} | " + " | ".join(f"{mean:.1%}" for mean in means) + " |")
    return lines


def shown(ends: Sequence[float]) -> str:
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}"


def plot(rows: Sequence[Row], path: Path) -> bool:
    """GRPO's reward by step, and RAFT's accuracy by cycle, a line a seed. False where there is neither."""
    rows = sorted(rows, key=lambda row: row["seed"])
    grpo = [row for row in rows if "rewards" in row]
    raft = [row for row in rows if "cycles" in row]
    if not grpo and not raft:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for row in grpo:
        left.plot(*zip(*row["rewards"], strict=True), linewidth=1, label=f"seed {row['seed']}")
    for row in raft:
        right.plot(range(len(row["cycles"])), row["cycles"], marker="o", label=f"seed {row['seed']}")
    left.set(xlabel="step", title="GRPO: reward of the samples", ylim=(0, 1.02))
    right.set(xlabel="cycle", title="RAFT: held-out accuracy", ylim=(0, 1.02))
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    for axes, drawn in ((left, grpo), (right, raft)):
        if drawn:
            axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
