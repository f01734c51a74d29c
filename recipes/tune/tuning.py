"""What every tuning does around its trials: before, after, the overrides that apply what was found, and an experiment file with them.

    python launch/run.py 'hydra.searchpath=[file://<run>/conf]' experiment=<name>

starts what was measured; copied to conf/experiment/, the file is an experiment like any other.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import DictConfig, OmegaConf

from recipes.bench.series import Column, Row, Table, show
from recipes.common.errors import UserError
from recipes.common.names import Arguments, named
from recipes.common.program import Failed, say
from recipes.tune.rows import full_rows
from recipes.tune.trial import Setting, num_ranks, word

STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")  # whose product a rank reads for a step of the optimizer
TRAINING = (
    Column("tokens_per_second", "tokens/s", 0),
    Column("step_s", "s/step", 3),
    Column("spread", "spread", 2),
    Column("memory_gb", "GB", 1),
)


@dataclass
class TuneConfig(Arguments):
    """What each tuning takes. `recipe`: the method whose runs are its trials; arguments that are none of the tuning's are the recipe's.

    Raises UserError for a value out of range.
    """

    fail_below: ClassVar[None] = None  # a gate is a benchmark's

    output_dir: str
    recipe: str = "sft"
    seed: int = 0


@dataclass
class TrainingTuneConfig(TuneConfig):
    """A tuning whose trials train. `steps` are measured after `warmup` ones. `rows`: `full`, text that fills every row to max_length, so
    that each step has the shapes and the memory that were planned; or `data`, the rows of `data=`."""

    steps: int = 10
    warmup: int = field(default=5, metadata={"least": 1})
    rows: str = named(lambda: ("full", "data"), "full")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "full" and self.recipe not in ("sft", "dpo"):
            raise UserError(f"method.args.rows=full with recipe={self.recipe}: full rows are for sft and dpo. Use: method.args.rows=data.")


def trial_data(config: DictConfig, args: TrainingTuneConfig, most: int) -> dict[str, Any]:
    """Keys of config.data for trials whose steps take up to `most` rows, all ranks together."""
    if args.rows == "data":
        return {}
    length = config.tuned.trainer_args.max_length
    if length is None:
        raise UserError("method.args.max_length=null: nothing says how long a row is. Give a number of tokens.")
    path = Path(config.run_dir) / "trials" / "rows.jsonl"
    full_rows(path, args.recipe, length, most * (args.steps + args.warmup), args.seed)
    return {"name": "full rows", "kind": "jsonl", "path": str(path), "limit": None}


def require_first(rows: Sequence[Row]) -> None:
    """Raises UserError where the recipe as it stands has failed: no further trial has anything to be compared with."""
    if rows and rows[0]["error"]:
        raise UserError("not measured: the recipe as it stands failed")


def finish(
    config: DictConfig, table: Table, rows: Sequence[Row], before: Row, settings: Sequence[Setting], notes: Sequence[str] = ()
) -> Row:
    """The content of result.json: the best of `rows` against `before`, one of them. `settings` are those of the rows.

    Raises Failed with the rows where `before` failed, or every row did.
    """
    content = {
        "tuning": table.benchmark,
        "columns": [asdict(column) for column in table.columns],
        "figure": table.figure,
        "higher_is_better": table.higher_is_better,
        "rows": list(rows),
        "notes": [*table.notes, *notes],
    }
    if before["error"]:
        show(table, rows, config.hardware.name, content["notes"])
        raise Failed(f"the recipe as it stands could not be measured: {before['error']}", **content)
    measured = [(row, setting) for row, setting in zip(rows, settings, strict=True) if not row["error"] and row.get(table.figure)]
    sign = 1 if table.higher_is_better else -1
    best, setting = max(measured, key=lambda one: sign * one[0][table.figure])
    gain = best[table.figure] / before[table.figure] if table.higher_is_better else before[table.figure] / best[table.figure]
    overrides = setting.overrides()
    path, command = write_experiment(config, table, setting, before, best)
    content["notes"] += other_steps(config, setting)
    title = next(column.title for column in table.columns if column.key == table.figure)
    lines = [*content["notes"], f"before: {before[table.figure]:,.4g} {title}; after: {best[table.figure]:,.4g}, {gain:.3f} times as good"]
    spread = max(before.get("spread", 0.0), best.get("spread", 0.0))
    if 1 < gain < 1 + spread:
        lines.append(f"steps of one run lie {spread:.3f} apart: a gain below that may be none")
    lines += [f"overrides: {shlex.join(overrides) or 'none: what stands is the fastest'}", f"experiment: {path}", f"  {command}"]
    show(table, rows, config.hardware.name, lines)
    say(f"done: {gain:.3f} times as good")
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


def other_steps(config: DictConfig, setting: Setting) -> list[str]:
    """That the optimizer's steps would take another number of sequences, at the same learning rate."""
    own: dict[str, Any] = dict(config.tuned.trainer_args)
    both = own, {**own, **setting.args}
    before, after = (num_ranks() * math.prod(args.get(key) or 1 for key in STEP) for args in both)
    at_once = num_ranks() * (both[1].get("per_device_train_batch_size") or 1)
    keeps = f"effective_batch={before} keeps them." if before % at_once == 0 else "a sweep of learning rates says whether it has to follow."
    return [] if before == after else [f"{after} sequences a step, before {before}, at the same learning rate; {keeps}"]


def start_of(path: Path) -> list[str]:
    """Return the command that starts an experiment file of a run directory."""
    return ["python", "launch/run.py", f"hydra.searchpath=[{word(f'file://{path.parents[1]}')}]", f"experiment={path.stem}"]


def write_experiment(config: DictConfig, table: Table, setting: Setting, before: Row, after: Row) -> tuple[Path, str]:
    """The experiment file, in a folder that Hydra can search, and the command that starts it."""
    base: dict[str, Any] = OmegaConf.to_container(config.tuned.experiment)  # type: ignore[assignment]
    name = "_".join(["tuned", table.benchmark, *(base["groups"][group] for group in ("method", "model", "hardware"))]).replace("/", "_")
    path = Path(config.run_dir) / "conf" / "experiment" / f"{name}.yaml"
    values = base["values"]
    if setting.args:
        values["method"] = {**values.get("method", {}), "args": {**values.get("method", {}).get("args", {}), **setting.args}}
    if setting.env:
        values["user_env"] = {**values.get("user_env", {}), **setting.env}
    command = shlex.join(start_of(path))
    smoke = ["# From a smoke run: its figures say nothing about this GPU."] if config.smoke else []
    header = [
        "# @package _global_",
        f"# What method=tune/{table.benchmark} found for {base['groups']['method']}: {table.figure} {before[table.figure]:.6g} before, "
        f"{after[table.figure]:.6g} after.",
        *(f"# {line}" for line in other_steps(config, setting)),
        *smoke,
        f"# Needs:     {config.hardware.product}, and the image and versions of {config.run_dir}.",
        f"# Launch:    {command}",
        f"# Override:  {command} mode=plan",
    ]
    content = {
        "defaults": [{f"override /{group}": option} for group, option in base["groups"].items()],
        "name": name,
        **values,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(header) + "\n" + yaml.safe_dump(content, sort_keys=False))
    return path, command
