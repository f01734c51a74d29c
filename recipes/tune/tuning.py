"""Run the trials of a tuning run, and write an experiment file with the best setting.

    python launch/run.py experiment=<run>/conf/experiment/<name>.yaml

runs that setting. A copy of the file in conf/experiment/ is experiment=<name>.
conf/method/tune/<name>.yaml has the command that starts a tuning run.
"""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from recipes.bench.benchmark import Row, Table, measure_rows, show
from recipes.rank.names import name_field
from recipes.rank.program import Failed
from recipes.rank.ranks import num_ranks
from recipes.tune.trial import Setting, run, speed

CHARACTERS = 4  # digits per token, because tokenizers join at most three digits
# The product of these arguments is the number of rows that a rank reads per optimizer step.
STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
TRAINING = "tokens_per_second step_s spread memory_gb"  # columns


@dataclass
class TuneConfig:
    """Arguments of every tuning run. `recipe`: the method that the trials run.

    Arguments that are not declared here or in a subclass are passed to the recipe.
    """

    fail_below: ClassVar[None] = None  # only benchmarks have a gate

    output_dir: str
    recipe: str = "sft"
    seed: int = 0


@dataclass
class TrainingTuneConfig(TuneConfig):
    """Arguments of a tuning run whose trials train. `steps` are measured, after `warmup` others.

    `rows`: with `full`, text fills every row to max_length, so that each step has the planned
    shapes and memory. With `data`, rows come from `data=`.
    """

    steps: int = 10
    warmup: int = field(default=5, metadata={"minimum": 1})
    rows: str = name_field(lambda: ("full", "data"), "full")


def training(
    config: DictConfig,
    args: TrainingTuneConfig,
    name: str,
    setting: Setting,
    env: Mapping[str, str] = {},
    steps: int | None = None,
) -> Row:
    """Run a trial, and return the speed of `steps` steps after args.warmup others.

    Raise UserError if the trial fails.
    """
    steps = steps or args.steps
    bounds = {"max_steps": args.warmup + steps, "num_train_epochs": 1, "logging_steps": 1}
    bounds |= {"save_strategy": "no", "eval_strategy": "no"}
    data = full_rows(config, args, setting, steps) if args.rows == "full" else {}
    return speed(run(config, name, setting, bounds, data, env), args.warmup)


def full_rows(
    config: DictConfig, args: TrainingTuneConfig, setting: Setting, steps: int
) -> dict[str, Any]:
    """Write rows that fill max_length, so that every step has the same shape.

    Return the keys of config.data that use these rows. Raise UserError for other methods than sft
    and dpo, and without max_length.
    """
    trial_args = {**config.tuned.trainer_args, **setting.args}
    length = trial_args.get("max_length")
    if args.recipe not in ("sft", "dpo") or length is None:
        raise UserError(
            f"method.args.rows=full with method.args.recipe={args.recipe}: only sft and dpo with "
            "method.args.max_length have full rows. Use method.args.rows=data."
        )
    rows_per_step = num_ranks() * math.prod(trial_args.get(key) or 1 for key in STEP)
    count = rows_per_step * (steps + args.warmup)
    path = Path(config.run_dir) / "trials" / f"rows-{count}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng, staged = random.Random(args.seed), path.with_suffix(".staged")
        with staged.open("w") as file:
            for _ in range(count):  # the trainer truncates these rows to max_length
                text = "".join(rng.choices("0123456789", k=CHARACTERS * length))
                pair = {"prompt": text[:CHARACTERS], "chosen": text, "rejected": text[::-1]}
                file.write(json.dumps({"text": text} if args.recipe == "sft" else pair) + "\n")
        staged.replace(path)
    return {"name": "full rows", "kind": "jsonl", "path": str(path), "limit": None}


def measure_trials(
    config: DictConfig, args: TuneConfig, table: Table, runs: Sequence[Row], work: Callable
) -> list[Row]:
    """Measure runs of the recipe, and return their rows. Skip the others if the first fails."""

    def after_failure(case: Row, rows: list[Row]) -> str | None:
        failed = case != runs[0] and rows[0]["error"]
        return "the unchanged recipe failed" if failed else None

    return measure_rows(config, args, table, runs, work, after_failure)


def finish(
    config: DictConfig,
    table: Table,
    rows: Sequence[Row],
    before: Row,
    settings: Sequence[Setting],
    notes: Sequence[str] = (),
) -> Row:
    """Write an experiment with the best of `settings`, and return the content of result.json.

    Each setting belongs to one of `rows`. `before` is the row of the unchanged recipe. Raise Failed
    if this row has an error.
    """
    figure = table.figure
    content = {"tuning": table.benchmark, **table.content(rows, [*table.notes, *notes])}
    if before["error"]:
        show(table, rows, config.hardware.name, content["notes"])
        raise Failed(f"the unchanged recipe failed: {before['error']}", **content)
    pairs = zip(rows, settings, strict=True)
    measured = [pair for pair in pairs if not pair[0]["error"] and pair[0].get(figure)]
    best, setting = max(measured, key=lambda pair: pair[0][figure])
    gain, overrides = best[figure] / before[figure], setting.overrides()
    path, command = write_experiment(config, table, setting, before, best)
    content["notes"] += batch_change_notes(config, setting)
    lines = [*content["notes"]]
    spread = max(before.get("spread", 0.0), best.get("spread", 0.0))
    if 1 < gain < 1 + spread:
        lines.append(
            f"step times within a run vary by {spread:.1%}, so a gain of {gain - 1:.1%} may be "
            "noise"
        )
    lines += [
        f"{figure}: {before[figure]:,.4g} before, {best[figure]:,.4g} after ({gain:.3f} times)",
        f"overrides: {shlex.join(overrides) or 'none, the unchanged recipe is the fastest'}",
        f"experiment: {path}\n  {command}",
    ]
    show(table, rows, config.hardware.name, lines)
    figures = {column.key for column in table.columns if column.digits is not None}
    return {
        **content,
        "before": {key: value for key, value in before.items() if key in figures},
        "after": {key: value for key, value in best.items() if key in figures},
        "gain": gain,
        "overrides": overrides,
        "experiment": str(path),
        "command": command,
    }


def batch_change_notes(config: DictConfig, setting: Setting) -> list[str]:
    """Return a note if the setting changes the number of sequences per optimizer step."""
    recipe_args: dict[str, Any] = dict(config.tuned.trainer_args)
    tuned = {**recipe_args, **setting.args}
    before, after = (
        num_ranks() * math.prod(args.get(key) or 1 for key in STEP) for args in (recipe_args, tuned)
    )
    if before == after:
        return []
    micro_step = num_ranks() * (tuned.get(STEP[0]) or 1)
    remedy = "Sweep the learning rate to find the best one."
    if before % micro_step == 0:
        remedy = f"To restore {before}, use effective_batch={before}."
    return [f"{after} sequences per step instead of {before}, at the same learning rate. {remedy}"]


def launch_command(path: Path) -> list[str]:
    """Return the command that starts an experiment file."""
    return ["python", "launch/run.py", f"experiment={path}"]


def write_file(
    config: DictConfig,
    path: Path,
    header: Sequence[str],
    commands: tuple[str, str],
    content: dict[str, Any],
) -> None:
    """Write an experiment file. `commands` are the command that starts it and an override."""
    smoke = "From a smoke run, whose figures say nothing about this GPU."
    launch, override = commands
    lines = ["@package _global_", *header, *([smoke] if config.smoke else [])]
    lines += [f"Launch:    {launch}", f"Override:  {override}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    comments = "".join(f"# {line}\n" for line in lines)
    path.write_text(comments + yaml.safe_dump(content, sort_keys=False))


def write_experiment(
    config: DictConfig, table: Table, setting: Setting, before: Row, after: Row
) -> tuple[Path, str]:
    """Write the experiment file, and return its path and the command that starts it."""
    base: dict[str, Any] = OmegaConf.to_container(config.tuned.experiment)  # type: ignore[assignment]
    groups, values = base["groups"], base["values"]
    parts = ["tuned", table.benchmark, groups["method"], groups["model"], groups["hardware"]]
    name = "_".join(parts).replace("/", "_")
    path = Path(config.run_dir) / "conf" / "experiment" / f"{name}.yaml"
    if setting.args:
        method = values.get("method", {})
        values["method"] = {**method, "args": {**method.get("args", {}), **setting.args}}
    if setting.env:
        values["user_env"] = {**values.get("user_env", {}), **setting.env}
    command = shlex.join(launch_command(path))
    header = [
        f"Result of method=tune/{table.benchmark} for {groups['method']}: "
        f"{table.figure} {before[table.figure]:.6g} before, {after[table.figure]:.6g} after.",
        *batch_change_notes(config, setting),
        f"Needs:     {config.hardware.product}, and the image and versions of {config.run_dir}.",
    ]
    defaults = [{f"override /{group}": option} for group, option in groups.items()]
    content = {"defaults": defaults, "name": name, **values}
    write_file(config, path, header, (command, f"{command} mode=plan"), content)
    return path, command
