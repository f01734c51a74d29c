"""Evaluate YAML tables of conditions on a composition.

launch/rules/conflicts.yaml explains the words of a condition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from launch.config.compose import leaf
from launch.core.json_files import yaml_file
from launch.schema import Config
from launch.schema.trainer_args import value_or_none

# name -> function that computes the value of `fact.<name>`, a condition without a key
Facts = Mapping[str, Callable[[Config], Any]]
rows = functools.cache(yaml_file)


def setting(config: Config, key: str, facts: Facts) -> Any:
    """Return the value of a key, of an argument (or its default) or of a fact; enums by name."""
    group, _, name = key.rpartition(".")
    if group == "fact":
        return facts[name](config)
    value = value_or_none(config, name) if group == "method.args" else leaf(config, key)
    return value.name if isinstance(value, Enum) else value


def is_met(condition: Any, value: Any) -> bool:
    """Return whether a value meets one condition of a table."""
    if isinstance(condition, list):
        return value in condition
    if condition in ("given", "absent"):
        return (value in (None, False, 0, "none", [], {})) == (condition == "absent")
    if condition == "several":
        return isinstance(value, int) and value > 1
    if condition == "not positive":
        return not value or value <= 0
    word, _, other = condition.partition(" ") if isinstance(condition, str) else ("", "", "")
    if word == "has":
        return other in (value or [])
    return bool(value != other if word == "not" else value == condition)


def all_met(config: Config, conditions: dict[str, Any], facts: Facts) -> bool:
    """Return whether the composition meets all conditions, which are given by key."""
    return all(is_met(cell, setting(config, key, facts)) for key, cell in conditions.items())


def table(file: str, name: str) -> Any:
    """Return the rows of <name>.yaml in the directory of a module's `file`."""
    return rows(Path(file).with_name(f"{name}.yaml"))
