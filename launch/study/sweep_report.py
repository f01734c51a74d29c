"""Show how a sweep ended: a table of trials, the best one as a command, and sweep.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.core.errors import EXIT_INTERRUPTED
from launch.core.json_files import plain
from launch.plan.show import say, short_path
from launch.schema import Config, Direction, Sweep
from launch.schema.enums import Format
from launch.study.trials import OF_ROWS, Trial, typed

SCHEMA = 1
USUAL = ("gain", "accuracy", "reward", "loss")


def usual(values: Mapping[str, float | None]) -> str | None:
    """Return the figure for a grid without a metric: a benchmark's best row or one of USUAL."""
    names = (*(name for name in values if name.startswith(OF_ROWS)), *USUAL)
    return next((name for name in names if values.get(name) is not None), None)


def less_is_better(metric: str | None) -> bool:
    """Return whether less is better for a figure that `usual` chose."""
    return metric is not None and (metric == "loss" or metric.startswith("least_"))


def metric_of(content: Mapping[str, Any]) -> str | None:
    """Return the metric that orders a sweep.json's trials: its own, or the only one they have."""
    rows = [row for row in content["trials"] if row.get("metric") and row.get("value") is not None]
    metrics = {str(row["metric"]) for row in rows}
    return content.get("metric") or (metrics.pop() if len(metrics) == 1 else None)


def goal_of(metric: str | None) -> Direction | None:
    """Return which direction of a figure is better, if its name shows it."""
    bare = (metric or "").removeprefix("best_").removeprefix("eval_")
    if less_is_better(bare):
        return Direction.minimize
    return Direction.maximize if bare in USUAL or bare.startswith("most_") else None


def best(sweep: Sweep, trials: list[Trial]) -> Trial | None:
    """Return the finished trial with the best value (the first of equals), or None."""
    valued = [trial for trial in trials if trial.status == "done" and trial.value is not None]
    if sweep.metric is None or not valued:
        return None
    sign = 1 if sweep.direction == Direction.minimize else -1
    return min(valued, key=lambda trial: (sign * (trial.value or 0.0), trial.number))


def as_object(
    folder: Path, sweep: Sweep, shared: list[str], trials: list[Trial], total: int
) -> dict[str, Any]:
    """Return the content of sweep.json."""
    winner = best(sweep, trials)
    return {
        "schema": SCHEMA,
        "name": folder.name,
        "directory": str(folder),
        "overrides": shared,
        "metric": sweep.metric,
        "direction": sweep.direction.value,
        "space": plain(sweep.space),
        "num_trials": total,
        "trials": [asdict(trial) for trial in sorted(trials, key=lambda t: t.number)],
        "best": winner
        and {
            "number": winner.number,
            "value": winner.value,
            "overrides": winner.varied,
            "command": typed([*shared, *winner.varied]),
        },
    }


def show_end(config: Config, content: dict[str, Any], exit_code: int) -> None:
    """Print the table of trials, the best command, and where the files are."""
    if config.format == Format.json:
        print(json.dumps({**content, "exit_code": exit_code}, indent=1))
        return
    sweep, trials = config.sweep, content["trials"]
    table = Table("trial", "overrides", "figure", "status", title="Trials", title_justify="left")
    table.add_column("run directory", overflow="fold")  # so that it can be copied
    for row in trials:
        value = "" if row["value"] is None else f"{row['metric']} {row['value']:.6g}"
        why = f", exit code {row['exit_code']}: {row['why']}"[:120] if row["why"] else ""
        status = Text(row["status"] + why, style="red" if row["status"] == "failed" else "")
        run_dir = row["run_dir"] and short_path(row["run_dir"])
        table.add_row(str(row["number"]), Text(short(row["varied"])), value, status, run_dir)
    Console().print(table)
    counts = Counter(row["status"] for row in trials)
    before = sum(row["status"] == "done" and not row["ran"] for row in trials)
    again = f"; {before} of them finished earlier and are not run again" if before else ""
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    say(config, f"{summary or 'no trial has begun'}, of {content['num_trials']}{again}")
    metric = metric_of(content)
    if winner := content["best"]:
        best_line = f"best {sweep.metric} {winner['value']:.6g}, trial {winner['number']}"
        say(config, f"{best_line}:\n  {winner['command']}")
    elif metric and sweep.metric is None and counts["done"] > 1:
        way = " sweep.direction=maximize" if goal_of(metric) == Direction.maximize else ""
        hint = f"To name the best, add sweep.metric={metric}{way}. No finished trial runs again."
        say(config, hint)
    if exit_code == EXIT_INTERRUPTED:
        say(config, "interrupted; the same command resumes")
    say(config, f"Everything is in {short_path(content['directory'])}")


def short(varied: list[str]) -> str:
    """Return overrides with the last part of each key and four digits: learning_rate=4.43e-05."""
    parts = (o.partition("=") for o in varied)
    return " ".join(
        f"{key.lstrip('+').rsplit('.', 1)[-1]}={_rounded(value)}" for key, _, value in parts
    )


def _rounded(text: str) -> str:
    try:
        return text if len(text) < 8 else f"{float(text):.4g}"
    except ValueError:
        return text
