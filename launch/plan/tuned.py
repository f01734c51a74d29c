"""Prepare a tuning (method=tune/...).

That is its recipe, the planned memory of each candidate, and the start of its experiment file.

The recipe is composed and checked as for its own run. Arguments under method.args that the tuning
does not have are the recipe's: `method=tune/batch method.args.max_length=4096`. So `experiment=NAME
method=tune/batch` tunes an experiment's recipe.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.config.compose import compose
from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.estimate import batch_counts, margin, memory
from launch.inputs import paths
from launch.machine import placement
from launch.machine.detect import Host
from launch.rules import check
from launch.schema import Config, trainer_args
from launch.schema.enums import Vendor

GROUPS = ("hardware", "model", "method", "adapter", "precision", "topology", "data", "tracking")
# Other keys of the recipe. Runtime and container are left out because they follow from the
# hardware.
KEYS = ("user_env", "effective_batch", "seed")
BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
CHECKPOINTING = "gradient_checkpointing"


def recipe(config: Config) -> Config | None:
    """Return the composition of a tuning's trials; None for any other method.

    Raises UserError.
    """
    name = trainer_args.recipe_name(config)
    if name is None:
        return None
    method, own = _standard(config, name).method, trainer_args.class_arguments(config)
    user_args = {key: value for key, value in config.method.args.items() if key not in own}
    args = {**method.args, **(method.smoke if config.smoke else {}), **user_args}
    if config.smoke:
        args.pop("num_train_epochs", None)  # a trial is limited by its steps
    rewards = config.method.rewards or method.rewards
    method = dataclasses.replace(method, args=args, rewards=rewards)
    tuned = dataclasses.replace(config, method=method)
    batch_counts.apply_effective_batch(tuned)
    return tuned


def check_recipe(config: Config) -> None:
    """Raise UserError if the recipe alone would be rejected."""
    tuned = recipe(config)
    if tuned is None:
        return
    if "rows" in trainer_args.class_arguments(config) and not tuned.method.trains:
        raise UserError(
            f"method.args.recipe={tuned.method.name}: {config.method.name} measures training "
            "steps. Use: sft, dpo or grpo."
        )
    try:
        check.check(tuned)
    except UserError as error:  # about the recipe, not the method that the user chose
        raise UserError(
            f"method={config.method.name} has {tuned.method.name} for its trials: {error}"
        ) from error


def for_ranks(
    config: Config, host: Host, run_dir: Path, ports: tuple[int, int]
) -> dict[str, Any] | None:
    """Return `tuned` of the file that ranks read; None without a tuning.

    It has the recipe's method and arguments, and the place where tuned files outlive the run.
    """
    tuned = recipe(config)
    if tuned is None:
        return None
    in_container = config.runtime.on_node == "docker"
    cache = paths.home(config, host) if in_container else paths.cache_dir(host) / "rocm-recipes"
    return {
        "method": tuned.method,
        "trainer_args": trainer_args.complete(tuned, run_dir, ports),
        "cache": str(cache),
        "planned": planned(config, tuned, host),
    }


def planned(config: Config, tuned: Config, host: Host) -> list[dict[str, Any]]:
    """Return the candidates of tune/batch with the planned GB of their tightest process."""
    if "batches" not in trainer_args.class_arguments(config):
        return []
    groups = placement.process_groups(tuned, host)
    smaller, candidates = memory.measured(tuned, groups, host), []
    own = (trainer_args.value(tuned, CHECKPOINTING), trainer_args.value(tuned, BATCH))
    keys = ("checkpointing", "batches")
    pairs = itertools.product(*(trainer_args.value(config, key) for key in keys))
    for checkpointing, size in sorted({own, *pairs}):
        args = {**tuned.method.args, BATCH: size, CHECKPOINTING: checkpointing}
        candidate = dataclasses.replace(tuned, method=dataclasses.replace(tuned.method, args=args))
        try:
            batch_counts.apply_effective_batch(candidate)
            check.check(candidate)
        except UserError:  # the recipe cannot take this batch
            continue
        most = max(memory.memory(candidate, groups, smaller), key=margin.tightness)
        recipe_args = {
            key: args[key] for key in (BATCH, CHECKPOINTING, ACCUMULATION) if key in args
        }
        sizes = {"planned_gb": most.allocated_gb, "capacity_gb": most.capacity_gb}
        candidates.append({"args": recipe_args, **sizes, "fits": most.fits})
    return candidates


def experiment(config: Config, command: Sequence[str]) -> dict[str, Any]:
    """Return the groups and values that restore the recipe as it was before the tuning.

    Under smoke=true it is composed again from the command, because the run was scaled down.
    """
    if config.smoke:
        config = dataclasses.replace(compose(command), smoke=False)
    tuned = recipe(config)
    if tuned is None:
        raise UserError(f"{' '.join(command)}: names no tuning")
    groups = {group: str(getattr(tuned, group).name) for group in GROUPS}
    standard = _standard(tuned, tuned.method.name)
    values = {}
    for key in (*GROUPS, *KEYS):
        differing = _differing(plain(getattr(tuned, key)), plain(getattr(standard, key)))
        if differing not in (None, {}):
            values[key] = differing
    if tuned.method.measures_machine and tuned.hardware.vendor == Vendor.none:
        values["smoke"] = True  # a CPU cannot run it otherwise
    return {"groups": groups, "values": values}


@functools.cache
def _composed(*groups: tuple[str, str]) -> Config:
    """Return the composition of the groups alone. Callers must not change it."""
    overrides = [f"{group}={name}" for group, name in groups]
    return compose([*overrides, "runtime=local", "container=none"])


def _standard(config: Config, method: str) -> Config:
    names = {group: str(getattr(config, group).name) for group in GROUPS} | {"method": method}
    return _composed(*names.items())


def _differing(mine: Any, standard: Any) -> Any:
    """Return the nested keys whose values differ from `standard`, or None."""
    if isinstance(mine, dict) and isinstance(standard, dict):
        differing = {key: _differing(value, standard.get(key)) for key, value in mine.items()}
        return {
            key: value
            for key, value in differing.items()
            if value not in (None, {}) or (key in standard and mine[key] != standard[key])
        }
    return None if mine == standard else mine
