"""Run the steps around the trials of any tuning, and write an experiment file with the result.

    python launch/run.py 'hydra.searchpath=[file://<run>/conf]' experiment=<name>

starts the measured setting. If copied to conf/experiment/, the file is an ordinary experiment.
conf/method/tune/<name>.yaml shows how to start a tuning.
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
from recipes.rank.names import named
from recipes.rank.program import Failed
from recipes.rank.ranks import num_ranks
from recipes.tune.trial import Setting, hydra_value, run, speed

CHARACTERS = 4  # digits per token; no tokenizer in use joins more than three into a token
# Their product is the number of rows that a rank reads for an optimizer step.
STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
TRAINING = "tokens_per_second step_s spread memory_gb"  # columns


@dataclass
class TuneConfig:
    """Hold the arguments of every tuning. `recipe` is the method whose runs are its trials.

    Arguments that are not declared here or in a subclass go to the recipe.
    """

    fail_below: ClassVar[None] = None  # only benchmarks have a gate

    output_dir: str
    recipe: str = "sft"
    seed: int = 0


@dataclass
class TrainingTuneConfig(TuneConfig):
    """Hold the arguments of a tuning whose trials train. `steps` are measured after `warmup`.

    `rows`: `full` is text that fills every row to max_length, so that each step has the planned
    shapes and memory; `data` is the rows of `data=`.
    """

    steps: int = 10
    warmup: int = field(default=5, metadata={"least": 1})
    rows: str = named(lambda: ("full", "data"), "full")


def training(
    config: DictConfig,
    args: TrainingTuneConfig,
    name: str,
    setting: Setting,
    env: Mapping[str, str] = {},
    steps: int | None = None,
) -> Row:
    """Return the speed of `steps` steps after args.warmup. Raise UserError if the trial failed."""
    steps = steps or args.steps
    bounds = {"max_steps": args.warmup + steps, "num_train_epochs": 1, "logging_steps": 1}
    bounds |= {"save_strategy": "no", "eval_strategy": "no"}
    data = full_rows(config, args, setting, steps) if args.rows == "full" else {}
    return speed(run(config, name, setting, bounds, data, env), args.warmup)


def full_rows(
    config: DictConfig, args: TrainingTuneConfig, setting: Setting, steps: int
) -> dict[str, Any]:
    """Write rows that fill max_length, and return the keys of config.data for a trial with them.

    Every step then has the same shape. Raise UserError if rows cannot be full.
    """
    own = {**config.tuned.trainer_args, **setting.args}
    length = own.get("max_length")
    if args.recipe not in ("sft", "dpo") or length is None:
        raise UserError(
            f"method.args.rows=full with method.args.recipe={args.recipe}: rows are filled for sft "
            "and dpo, up to method.args.max_length tokens. Set both, or use method.args.rows=data."
        )
    count = num_ranks() * math.prod(own.get(key) or 1 for key in STEP) * (steps + args.warmup)
    path = Path(config.run_dir) / "trials" / f"rows-{count}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng, staged = random.Random(args.seed), path.with_suffix(".staged")
        with staged.open("w") as file:
            for _ in range(count):  # the trainer cuts longer rows
                text = "".join(rng.choices("0123456789", k=CHARACTERS * length))
                pair = {"prompt": text[:CHARACTERS], "chosen": text, "rejected": text[::-1]}
                file.write(json.dumps({"text": text} if args.recipe == "sft" else pair) + "\n")
        staged.replace(path)
    return {"name": "full rows", "kind": "jsonl", "path": str(path), "limit": None}


def measure_trials(
    config: DictConfig, args: TuneConfig, table: Table, runs: Sequence[Row], work: Callable
) -> list[Row]:
    """Return a row for each run of the recipe. If the first fails, do not measure the others."""

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
    """Return the content of result.json: the best of `rows` compared with `before`, one of them.

    `settings` are those of the rows. Raises Failed with the rows if `before` failed.
    """
    figure = table.figure
    content = {"tuning": table.benchmark, **table.content(rows, [*table.notes, *notes])}
    if before["error"]:
        show(table, rows, config.hardware.name, content["notes"])
        raise Failed(f"the unchanged recipe could not be measured: {before['error']}", **content)
    pairs = zip(rows, settings, strict=True)
    measured = [pair for pair in pairs if not pair[0]["error"] and pair[0].get(figure)]
    best, setting = max(measured, key=lambda pair: pair[0][figure])
    gain, overrides = best[figure] / before[figure], setting.overrides()
    path, command = write_experiment(config, table, setting, before, best)
    content["notes"] += batch_change_notes(config, setting)
    lines = [*content["notes"]]
    spread = max(before.get("spread", 0.0), best.get("spread", 0.0))
    if 1 < gain < 1 + spread:
        lines.append(f"steps of one run vary by {spread:.3f}, so a smaller gain may be noise")
    lines += [
        f"before: {before[figure]:,.4g} {figure}; after: {best[figure]:,.4g}, {gain:.3f} times",
        f"overrides: {shlex.join(overrides) or 'none: the recipe as it stands is the fastest'}",
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
    own: dict[str, Any] = dict(config.tuned.trainer_args)
    tuned = {**own, **setting.args}
    before, after = (
        num_ranks() * math.prod(args.get(key) or 1 for key in STEP) for args in (own, tuned)
    )
    if before == after:
        return []
    at_once = num_ranks() * (tuned.get(STEP[0]) or 1)
    remedy = "a sweep of learning rates shows whether to change it."
    if before % at_once == 0:
        remedy = f"effective_batch={before} keeps them."
    return [f"{after} sequences per step, before {before}, at the same learning rate; {remedy}"]


def launch_command(path: Path) -> list[str]:
    """Return the command that runs an experiment file in a run directory."""
    searchpath = f"hydra.searchpath=[{hydra_value(f'file://{path.parents[1]}')}]"
    return ["python", "launch/run.py", searchpath, f"experiment={path.stem}"]


def write_file(
    config: DictConfig,
    path: Path,
    header: Sequence[str],
    commands: tuple[str, str],
    content: dict[str, Any],
) -> None:
    """Write an experiment file. `commands` are its launch line and one override."""
    smoke = "From a smoke run: its figures say nothing about this GPU."
    launch, override = commands
    lines = ["@package _global_", *header, *([smoke] if config.smoke else [])]
    lines += [f"Launch:    {launch}", f"Override:  {override}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    comments = "".join(f"# {line}\n" for line in lines)
    path.write_text(comments + yaml.safe_dump(content, sort_keys=False))


def write_experiment(
    config: DictConfig, table: Table, setting: Setting, before: Row, after: Row
) -> tuple[Path, str]:
    """Write the experiment file where Hydra can search; return it and its launch command."""
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
