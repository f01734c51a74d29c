"""Describe optimizers, and reject arguments that the selected one does not read."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.core.errors import near
from launch.core.json_files import yaml_file
from launch.rules.refusal import Refusal
from launch.schema import Config
from launch.schema.trainer_args import value_or_none

ROWS: list[dict[str, Any]] = yaml_file(Path(__file__).with_name("optimizers.yaml"))


def optimizer(name: str) -> dict[str, Any]:
    """Return the row of an optimizer in optimizers.yaml; {} for an unknown name."""
    matches = (
        row for row in ROWS if any(fnmatch.fnmatchcase(name, p) for p in row["optim"].split())
    )
    return next(matches, {})


def optimizer_warnings(c: Config) -> Iterator[str]:
    """Warn about arguments of Adam that the optimizer ignores.

    They are not rejected, because files of conf/model_method set them for AdamW.
    """
    name = value_or_none(c, "optim") or ""
    ignored = [a for a in optimizer(name).get("ignores", "").split() if a in c.method.args]
    if ignored:
        keys = ", ".join(f"method.args.{argument}" for argument in ignored)
        yield f"{keys}: optim={name} does not read {'it' if len(ignored) == 1 else 'them'}."


def optimizer_problems(c: Config) -> Iterator[Refusal]:
    name = value_or_none(c, "optim") or ""
    row, modules = optimizer(name), value_or_none(c, "optim_target_modules")
    if modules and not row.get("modules"):
        message = f"method.args.optim_target_modules={modules}: optim={name} does not read it"
        remedy = "method.args.optim=galore_adamw, or '~method.args.optim_target_modules'"
        yield Refusal("optimizer_arguments", message, remedy)
    text = str(value_or_none(c, "optim_args") or "").replace(" ", "")
    names = str(row.get("optim_args", "")).split()
    for argument in filter(None, text.split(",")):
        key, is_pair, _ = argument.partition("=")
        if is_pair and (key in names or "any" in names):
            continue
        problem = f"optim={name} does not read {key}.{near(key, names)}"
        remedy = f"'method.args.optim_args=\"<name>=<value>\"' with {', '.join(names)}"
        if not names:
            problem, remedy = f"optim={name} reads no optim_args", "'~method.args.optim_args'"
        elif not is_pair:
            problem = f"{key} has no value"
        yield Refusal("optimizer_arguments", f"method.args.optim_args={text}: {problem}", remedy)
