"""Choose the reward that judges answers by what the rows have."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from launch.core.errors import UserError
from launch.core.json_lines import json_rows
from launch.core.row_columns import mapped
from launch.schema import Config, trainer_args
from launch.schema.data import Data

# in the order of preference, if the rows have the fields of several
REWARDS = ("reasoning_gym", "code_tests", "accuracy", "regex")
DEFAULT = "reasoning_gym"  # in conf/method; only generated problems have its field


def judging(rewards: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards that compare answers with a field of the rows, so 1 means correct."""
    fields = trainer_args.lock()["rewards"]
    return {name: weight for name, weight in rewards.items() if fields.get(name)}


def follow_rows(config: Config, keys: Collection[str]) -> None:
    """Replace the default reward by the one whose field the rows have, with the same weight.

    A reward that the user set stays (`keys`), and so do other rewards. If one of those judges
    answers too, or is the user's own function, the default is only removed. An evaluation has the
    default only if no other reward is set.
    """
    rewards = config.method.rewards
    if config.method.measures_model and config.data.has_heldout and not rewards:
        rewards[DEFAULT] = 1.0
    is_default = DEFAULT in rewards and f"method.rewards.{DEFAULT}" not in keys
    if not is_default or config.data.kind == "reasoning":
        return
    others = {name: weight for name, weight in rewards.items() if name != DEFAULT}
    judges = judging(others) or any("." in name for name in others)
    config.method.rewards = ({} if judges else {_fitting(config.data): rewards[DEFAULT]}) | others


def _fitting(data: Data) -> str:
    """Return the reward whose field the rows have; `accuracy` if that cannot be seen yet."""
    fields, needed = _fields(data), trainer_args.lock()["rewards"]
    return next((name for name in REWARDS if needed[name] in fields), "accuracy")


def _fields(data: Data) -> Collection[str]:
    """Return the fields of generated rows, of a file's first row, or that data.columns names."""
    if data.kind == "code":
        return ("tests",)
    path = data.path or data.heldout_path
    path = path or next((source.path for source in data.sources if source.path), None)
    if path:
        with contextlib.suppress(UserError):  # launch/plan/check_files.py reports the error
            return next((row for _, row in mapped(json_rows(Path(path)), data, None)), {})
    return data.columns
