"""What a sweep shows at its end: a table of trials with the best as a command line; sweep.json for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.schema import Config, Direction, Sweep
from launch.schema.enums import Format
from launch.sweeps.pool import typed
from launch.sweeps.trials import OF_ROWS, Trial

SCHEMA = 1
USUAL = ("gain", "accuracy", "reward", "loss")


def usual(found: Mapping[str, float | None]) -> str | None:
    """The figure that a grid which names no metric is shown by: that of a benchmark's best row, else the first of USUAL that a run has."""
    names = (*(name for name in found if name.startswith(OF_ROWS)), *USUAL)
    return next((name for name in names if found.get(name) is not None), None)


def less_is_better(metric: str | None) -> bool:
    """Of a figure that `usual` chose."""
    return metric is not None and (metric == "loss" or metric.startswith("least_"))


def metric_of(content: Mapping[str, Any]) -> str | None:
    """What the trials of a sweep.json are compared by: the metric that was asked for, or the one that all have; None where they differ."""
    found = list(dict.fromkeys(str(row["metric"]) for row in content["trials"] if row.get("metric") and row.get("value") is not None))
    return content.get("metric") or (found[0] if len(found) == 1 else None)


def goal_of(metric: str | None) -> Direction | None:
    """Which way a figure is better, where its name says so."""
    bare = (metric or "").removeprefix("best_").removeprefix("eval_")
    if less_is_better(bare):
        return Direction.minimize
    return Direction.maximize if bare in USUAL or bare.startswith("most_") else None


def best(sweep: Sweep, trials: list[Trial]) -> Trial | None:
    """The done trial with the best value; None where no metric orders them. Of equals the first."""
    valued = [trial for trial in trials if trial.status == "done" and trial.value is not None]
    if sweep.metric is None or not valued:
        return None
    sign = 1 if sweep.direction == Direction.minimize else -1
    return min(valued, key=lambda trial: (sign * (trial.value or 0.0), trial.number))


def as_object(folder: Path, sweep: Sweep, shared: list[str], trials: list[Trial], total: int) -> dict[str, Any]:
    """The content of sweep.json."""
    found = best(sweep, trials)
    return {
        "schema": SCHEMA,
        "name": folder.name,
        "directory": str(folder),
        "overrides": shared,
        "metric": sweep.metric,
        "direction": sweep.direction.value,
        "num_trials": total,
        "trials": [asdict(trial) for trial in sorted(trials, key=lambda t: t.number)],
        "best": found and {"number": found.number, "value": found.value, "overrides": found.varied, "command": command(shared, found)},
    }


def command(shared: list[str], trial: Trial) -> str:
    return typed([*shared, *trial.varied])


def show_end(config: Config, content: dict[str, Any], exit_code: int) -> None:
    """The table, the best overrides, and where everything is."""
    if config.format == Format.json:
        print(json.dumps({**content, "exit_code": exit_code}, indent=1))
        return
    console, sweep, metric = Console(), config.sweep, metric_of(content)
    differ = metric is None and any(row["value"] is not None for row in content["trials"])
    table = Table("trial", "overrides", metric or ("figure" if differ else ""), "status", title="Trials", title_justify="left")
    table.add_column("run directory", overflow="fold")  # to be copied whole
    for row in content["trials"]:
        status = Text(_status(row), style="red" if row["status"] == "failed" else "")
        figure = _number(row["value"]) + (f" {row['metric']}" if differ and row["metric"] else "")
        table.add_row(str(row["number"]), Text(short(row["varied"])), figure, status, relative(row["run_dir"]))
    console.print(table)
    trials = content["trials"]
    counts = {status: sum(row["status"] == status for row in trials) for status in ("done", "failed", "interrupted")}
    before = sum(row["status"] == "done" and not row["ran"] for row in trials)
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no trial has begun"
    say(config, f"{told}, of {content['num_trials']}" + (f"; {before} of them done before, not run again" if before else ""))
    found = content["best"]
    if found:
        say(config, f"best {sweep.metric} {found['value']:.6g}, trial {found['number']}:\n  {found['command']}")
    elif metric and sweep.metric is None and counts["done"] > 1:
        way = " sweep.direction=maximize" if goal_of(metric) == Direction.maximize else ""
        say(config, f"The same with sweep.metric={metric}{way} names the best; what is done is not run again.")
    if exit_code == 75:
        say(config, "interrupted; the same command goes on")
    say(config, f"Everything is in {relative(content['directory'])}")


def _status(row: dict[str, Any]) -> str:
    """With the reason of a failure, as far as it fits into a cell."""
    why = f": {row['why']}" if row["why"] else ""
    code = f", exit code {row['exit_code']}" if row["status"] == "failed" and row["exit_code"] is not None else ""
    return f"{row['status']}{code}{why[:100]}"


def short(varied: list[str]) -> str:
    """learning_rate=4.43e-05 where the override has all digits and the whole key."""
    return " ".join(f"{key.lstrip('+').rsplit('.', 1)[-1]}={_rounded(value)}" for key, _, value in (o.partition("=") for o in varied))


def _rounded(text: str) -> str:
    try:
        return text if len(text) < 8 else f"{float(text):.4g}"
    except ValueError:
        return text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def relative(path: str | None) -> str:
    """As it is shown: from where the command was given."""
    if path is None:
        return ""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def say(config: Config, line: str) -> None:
    """A line for a person, now: a sweep's output is often a file. format=json keeps stdout for JSON."""
    if config.format == Format.text:
        print(line, flush=True)
