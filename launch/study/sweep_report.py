"""Show the results of a sweep: a table of trials, and the command of the best one."""

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
from launch.plan.next_steps import command_line, short_path
from launch.plan.show import say
from launch.schema import Config, Direction, Sweep
from launch.schema.enums import Format
from launch.study.trials import ROW_PREFIXES, Trial

SCHEMA = 1
DEFAULT_METRICS = ("gain", "accuracy", "reward", "loss")


def default_metric(values: Mapping[str, float | None]) -> str | None:
    """Return the metric of a grid that sets none; a benchmark's best row comes first."""
    names = (*(name for name in values if name.startswith(ROW_PREFIXES)), *DEFAULT_METRICS)
    return next((name for name in names if values.get(name) is not None), None)


def less_is_better(metric: str | None) -> bool:
    """Return whether lower is better for a result of default_metric()."""
    return metric is not None and (metric == "loss" or metric.startswith("least_"))


def metric_of(content: Mapping[str, Any]) -> str | None:
    """Return the metric of a sweep.json: sweep.metric, or the only metric that its trials have."""
    rows = [row for row in content["trials"] if row.get("metric") and row.get("value") is not None]
    metrics = {str(row["metric"]) for row in rows}
    return content.get("metric") or (metrics.pop() if len(metrics) == 1 else None)


def goal_of(metric: str | None) -> Direction | None:
    """Return the better direction of a metric; None if its name does not determine it."""
    bare = (metric or "").removeprefix("best_").removeprefix("eval_")
    if less_is_better(bare):
        return Direction.minimize
    return Direction.maximize if bare in DEFAULT_METRICS or bare.startswith("most_") else None


def best(sweep: Sweep, trials: list[Trial]) -> Trial | None:
    """Return the finished trial with the best value, the first if several tie, or None."""
    valued = [trial for trial in trials if trial.status == "done" and trial.value is not None]
    if sweep.metric is None or not valued:
        return None
    sign = 1 if sweep.direction == Direction.minimize else -1
    return min(valued, key=lambda trial: (sign * (trial.value or 0.0), trial.number))


def sweep_json(
    folder: Path, sweep: Sweep, shared: list[str], trials: list[Trial], total: int
) -> dict[str, Any]:
    best_trial = best(sweep, trials)
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
        "best": best_trial
        and {
            "number": best_trial.number,
            "value": best_trial.value,
            "overrides": best_trial.varied,
            "command": command_line("run", *shared, *best_trial.varied),
        },
    }


def show_end(config: Config, content: dict[str, Any], exit_code: int) -> None:
    """Print the table of trials, the command of the best trial, and the directory."""
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
        table.add_row(
            str(row["number"]), Text(short_overrides(row["varied"])), value, status, run_dir
        )
    Console().print(table)
    counts = Counter(row["status"] for row in trials)
    num_earlier = sum(row["status"] == "done" and not row["ran"] for row in trials)
    earlier = f"; {num_earlier} of them finished in an earlier command" if num_earlier else ""
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    say(config, f"{summary or 'no trial has started'}, of {content['num_trials']}{earlier}")
    metric = metric_of(content)
    if best_row := content["best"]:
        best_line = f"best {sweep.metric} {best_row['value']:.6g}, trial {best_row['number']}"
        say(config, f"{best_line}:\n  {best_row['command']}")
    elif metric and sweep.metric is None and counts["done"] > 1:
        direction = " sweep.direction=maximize" if goal_of(metric) == Direction.maximize else ""
        hint = f"To select the best trial, add sweep.metric={metric}{direction}."
        say(config, f"{hint} Finished trials are not run again.")
    if exit_code == EXIT_INTERRUPTED:
        say(config, "interrupted; the same command resumes")
    say(config, f"Everything is in {short_path(content['directory'])}")


def short_overrides(varied: list[str]) -> str:
    """Shorten overrides to the last part of each key and four digits: learning_rate=4.43e-05."""
    parts = (o.partition("=") for o in varied)
    return " ".join(
        f"{key.lstrip('+').rsplit('.', 1)[-1]}={_rounded(value)}" for key, _, value in parts
    )


def _rounded(text: str) -> str:
    try:
        return text if len(text) < 8 else f"{float(text):.4g}"
    except ValueError:
        return text
