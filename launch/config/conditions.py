"""Read tables of conditions on a composition; launch/rules/conflicts.yaml describes their words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from launch.config.compose import leaf
from launch.core.json_files import yaml_file
from launch.schema import Config
from launch.schema.trainer_args import argument

# name of `fact.<name>` -> a condition or value that is not a key of the composition
Facts = Mapping[str, Callable[[Config], Any]]
rows = functools.cache(yaml_file)  # each table is read once


def setting(config: Config, key: str, facts: Facts) -> Any:
    """Return a key's value, an argument's default, or a fact; of an enum's member, the name."""
    group, _, name = key.rpartition(".")
    if group == "fact":
        return facts[name](config)
    value = argument(config, name) if group == "method.args" else leaf(config, key)
    return value.name if isinstance(value, Enum) else value


def accepts(allowed: Any, value: Any) -> bool:
    """Return whether a cell of a table accepts a value."""
    if isinstance(allowed, list):
        return value in allowed
    if allowed in ("given", "absent"):
        return (value in (None, False, 0, "none", [], {})) == (allowed == "absent")
    if allowed == "several":
        return isinstance(value, int) and value > 1
    if allowed == "not positive":
        return not value or value <= 0
    word, _, other = allowed.partition(" ") if isinstance(allowed, str) else ("", "", "")
    if word == "has":
        return other in (value or [])
    return bool(value != other if word == "not" else value == allowed)


def hold(config: Config, conditions: dict[str, Any], facts: Facts) -> bool:
    return all(accepts(cell, setting(config, key, facts)) for key, cell in conditions.items())


def table(file: str, name: str) -> Any:
    """Return the rows of <name>.yaml next to a module."""
    return rows(Path(file).with_name(f"{name}.yaml"))
