"""What a sweep shows: its plan, and at the end a table of trials with the best as a command line; sweep.json for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.plan import as_json, has_phases, pipeline_json, plain
from launch.schema import Config, Direction, Parameter, Sweep
from launch.schema_enums import Format
from launch.show import show_plan
from launch.sweep_pool import at_once, pack, typed
from launch.sweep_trials import OF_ROWS, Prepared, Trial

SCHEMA = 1
USUAL = ("gain", "accuracy", "reward", "loss")


def usual(found: Mapping[str, float | None]) -> str | None:
    """The figure that a grid which names no metric is shown by: that of a benchmark's best row, else the first of USUAL that a run has."""
    names = (*(name for name in found if name.startswith(OF_ROWS)), *USUAL)
    return next((name for name in names if found.get(name) is not None), None)


def less_is_better(metric: str | None) -> bool:
    """Of a figure that `usual` chose."""
    return metric is not None and (metric == "loss" or metric.startswith("least_"))


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
    console, sweep = Console(), config.sweep
    metric = sweep.metric or next((row["metric"] for row in content["trials"] if row["metric"]), "")
    table = Table("trial", "overrides", metric, "status", title="Trials", title_justify="left")
    table.add_column("run directory", overflow="fold")  # to be copied whole
    for row in content["trials"]:
        status = Text(_status(row), style="red" if row["status"] == "failed" else "")
        table.add_row(str(row["number"]), Text(short(row["varied"])), _number(row["value"]), status, _relative(row["run_dir"]))
    console.print(table)
    trials = content["trials"]
    counts = {status: sum(row["status"] == status for row in trials) for status in ("done", "failed", "interrupted")}
    before = sum(row["status"] == "done" and not row["ran"] for row in trials)
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no trial has begun"
    say(config, f"{told}, of {content['num_trials']}" + (f"; {before} of them done before, not run again" if before else ""))
    found = content["best"]
    if found:
        say(config, f"best {sweep.metric} {found['value']:.6g}, trial {found['number']}:\n  {found['command']}")
    if exit_code == 75:
        say(config, "interrupted; the same command goes on")
    say(config, f"Everything is in {_relative(content['directory'])}")


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


def _relative(path: str | None) -> str:
    if path is None:
        return ""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def say(config: Config, line: str) -> None:
    """A line for a person, now: a sweep's output is often a file. format=json keeps stdout for JSON."""
    if config.format == Format.text:
        print(line, flush=True)


def show_planned(config: Config, content: dict[str, Any], first: Prepared, gpus: list[int], refused: dict[int, str]) -> None:
    """mode=plan: the space, how many trials, how they are packed, and the plan of the first that is not refused."""
    sweep, wanted = config.sweep, first.num_gpus
    together = min(at_once(gpus, wanted, sweep.parallel), max(1, content["num_trials"]))
    sets: list[list[int]] = []
    while wanted and len(sets) < together and (block := pack(gpus, {gpu for s in sets for gpu in s}, wanted)):
        sets.append(block)
    run_dir = first.plans[-1].run_dir  # the first phases may lie in an earlier run
    plans = {plan.run_dir.name.partition("_")[2]: plan for plan in first.plans} if has_phases(first.config) else {}
    if config.format == Format.json:
        shown = pipeline_json(run_dir.parent.parent.name, run_dir.parent, plans) if plans else as_json(first.plans[0])
        added = {"space": plain(sweep.space), "at_once": together, "gpu_sets": sets, "refused": refused, "first": shown}
        print(json.dumps({**content, **added}, indent=1))
        return
    console = Console(width=None if Console().is_terminal else 120)
    if sweep.space:
        table = Table("parameter", "key", "tried", title=f"Space of {sweep.name}", title_justify="left")
        for name, parameter in sweep.space.items():
            table.add_row(name, parameter.key, Text(_tried(parameter)))
        console.print(table)
    goal = f", to {sweep.direction.value} {sweep.metric}" if sweep.metric else ""
    say(config, f"{content['num_trials']} trials{goal}, {_packed(together, sets, wanted)}, in {_relative(content['directory'])}")
    begun = [row["status"] for row in content["trials"] if row["status"] != "waiting"]
    if begun:
        counts = ", ".join(f"{begun.count(status)} {status}" for status in ("done", "failed", "interrupted") if status in begun)
        say(config, f"Continues: {counts}; what is done is not run again.")
    say(config, "The first to run:")
    for plan in first.plans:
        show_plan(plan, console, config.verbose)


def _tried(parameter: Parameter) -> str:
    if parameter.values is not None:
        return ", ".join(map(str, parameter.values))
    kind = ("whole numbers, " if parameter.integer else "") + ("uniform in the logarithm" if parameter.log else "uniform")
    return f"{parameter.low:g} to {parameter.high:g}, {kind}"


def _packed(together: int, sets: list[list[int]], wanted: int) -> str:
    one = "one after another" if together == 1 else f"{together} at once"
    if not wanted:
        return f"{one} on the CPU"
    return f"{one}, each on {wanted} GPU(s): {'; '.join(','.join(map(str, s)) for s in sets)}"
