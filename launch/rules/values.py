"""Reject values outside a list of words or a range, before any rule reads them.

The schema declares them next to its fields. The tables here are for method.args.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.core.errors import UserError, near
from launch.core.json_files import yaml_file
from launch.schema import Config
from launch.schema.checked import Range, Text
from launch.schema.trainer_args import class_of, known

Allowed = Range | Text | tuple[Any, ...]
FINITE = Range()
# Names that huggingface_hub's validate_repo_id accepts, with an owner.
REPOSITORY = Text(
    "a Hub repository",
    "<owner/name>",
    r"(?a)(?!.*(?:--|\.\.))(?!.*\.git$)[A-Za-z0-9][\w.-]*/[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?",
)
# By argument; OF_CLASS is for arguments whose range depends on the method.
ARGUMENTS: dict[str, Allowed] = {"push_to": REPOSITORY}
OF_CLASS: dict[str, dict[str, Allowed]] = defaultdict(dict)
for row in yaml_file(Path(__file__).with_name("values.yaml")):
    table = OF_CLASS[row["class"]] if "class" in row else ARGUMENTS
    allowed: Allowed = tuple(row["words"]) if "words" in row else Range(**row["range"])
    table |= dict.fromkeys(row["arguments"].split(), allowed)
UNSET = {"max_steps": -1}  # transformers' default, so num_train_epochs applies


def check_values(config: Config) -> None:
    """Raise UserError for the first value outside its list, range or pattern."""
    for key, value, allowed in (*_declared(config, ""), *_arguments(config)):
        check_value(key, value, allowed)


def check_value(key: str, value: Any, allowed: Allowed) -> None:
    """Raise UserError if a value is outside its list, range or pattern."""
    kinds: dict[type, Any] = {Range: (int, float), Text: str, tuple: object}
    if not isinstance(value, kinds[type(allowed)]) or value in allowed:
        return
    bounds = "a finite number" if allowed == FINITE else f"{allowed}"
    bounds += ", or -1 to use num_train_epochs" if key == "method.args.max_steps" else ""
    problem = f"out of range. Use: {bounds}."
    if isinstance(allowed, tuple):
        words = [word if isinstance(word, str) else json.dumps(word) for word in allowed]
        problem = f"it must be one of {', '.join(words)}.{near(str(value), words)}"
    elif isinstance(allowed, Text):
        problem = f"{allowed.problem(value)}. Use {allowed.meaning}, for example "
        problem += f"{key.partition('[')[0]}={allowed.example}."
    raise UserError(f"{key}={value}: {problem}")


def _declared(node: Any, prefix: str) -> Iterator[tuple[str, Any, Allowed]]:
    """Yield key, value and allowed values of each declared field, and of every other float."""
    for field in dataclasses.fields(node):
        value, key = getattr(node, field.name), f"{prefix}{field.name}"
        if isinstance(value, dict):
            children = [(f"{key}.{name}", child) for name, child in value.items()]
        elif isinstance(value, list):
            children = [(f"{key}[{number}]", child) for number, child in enumerate(value)]
        else:
            children = [(key, value)]
        for name, child in children:
            if dataclasses.is_dataclass(child):
                yield from _declared(child, f"{name}.")
            elif field.metadata or type(child) is float:
                yield name, child, field.metadata.get("allowed", FINITE)


def _arguments(config: Config) -> Iterator[tuple[str, Any, Allowed]]:
    args, of_class = config.method.args, {}
    if any(name in args for arguments in OF_CLASS.values() for name in arguments):
        of_class = OF_CLASS.get(class_of(config), {})
    for name, value in args.items():
        allowed = of_class.get(name) or ARGUMENTS.get(name, FINITE)
        is_checked = isinstance(value, (int, float, str)) and value != UNSET.get(name)
        if is_checked and (allowed is FINITE or name in known(config)):
            yield f"method.args.{name}", value, allowed
