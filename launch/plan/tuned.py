"""Compose and check the recipe that a tuning run (method=tune/...) runs in its trials.

Arguments under method.args that the tuning method lacks are passed to the recipe, for example
`method=tune/batch method.args.max_length=4096`. Therefore, `experiment=NAME method=tune/batch`
tunes the recipe of an experiment.
"""

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
# An experiment file also has these keys. It has no runtime and container, because they follow from
# the hardware.
KEYS = ("user_env", "effective_batch", "seed")
BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
CHECKPOINTING = "gradient_checkpointing"


def recipe(config: Config) -> Config | None:
    """Return the composition of a tuning run's trials; None for any other run.

    Raises UserError for a batch that does not divide effective_batch.
    """
    name = trainer_args.recipe_name(config)
    if name is None:
        return None
    method, tuning_args = _defaults(config, name).method, trainer_args.class_arguments(config)
    user_args = {key: value for key, value in config.method.args.items() if key not in tuning_args}
    args = {**method.args, **(method.smoke if config.smoke else {}), **user_args}
    if config.smoke:
        args.pop("num_train_epochs", None)  # max_steps limits a trial
    rewards = config.method.rewards or method.rewards
    method = dataclasses.replace(method, args=args, rewards=rewards)
    trial = dataclasses.replace(config, method=method)
    batch_counts.apply_effective_batch(trial)
    return trial


def check_recipe(config: Config) -> None:
    """Raise UserError if a tuning run's recipe breaks a rule."""
    trial = recipe(config)
    if trial is None:
        return
    if "rows" in trainer_args.class_arguments(config) and not trial.method.trains:
        raise UserError(
            f"method.args.recipe={trial.method.name}: {config.method.name} measures training "
            "steps. Use: method.args.recipe=sft, dpo or grpo."
        )
    try:
        check.check(trial)
    except UserError as error:  # about the recipe, not the method that the user chose
        raise UserError(
            f"method={config.method.name} runs {trial.method.name} in its trials: {error}"
        ) from error


def for_ranks(
    config: Config, host: Host, run_dir: Path, ports: tuple[int, int]
) -> dict[str, Any] | None:
    """Return the value of `tuned` in config.yaml; None unless the run is a tuning run.

    It contains the recipe's method and arguments, tune/batch's candidates, and the directory
    where the tuned files outlive the run.
    """
    trial = recipe(config)
    if trial is None:
        return None
    in_container = config.runtime.in_container
    cache = paths.home(config, host) if in_container else paths.cache_dir(host) / "rocm-recipes"
    return {
        "method": trial.method,
        "trainer_args": trainer_args.complete(trial, run_dir, ports),
        "cache": str(cache),
        "planned": candidates(config, trial, host),
    }


def candidates(config: Config, trial: Config, host: Host) -> list[dict[str, Any]]:
    """Return the candidates of tune/batch, each with the planned GB of its tightest process."""
    if "batches" not in trainer_args.class_arguments(config):
        return []
    groups = placement.process_groups(trial, host)
    smaller, candidates = memory.measured(trial, groups, host), []
    current = (trainer_args.value(trial, CHECKPOINTING), trainer_args.value(trial, BATCH))
    keys = ("checkpointing", "batches")
    pairs = itertools.product(*(trainer_args.value(config, key) for key in keys))
    for checkpointing, size in sorted({current, *pairs}):
        args = {**trial.method.args, BATCH: size, CHECKPOINTING: checkpointing}
        candidate = dataclasses.replace(trial, method=dataclasses.replace(trial.method, args=args))
        try:
            batch_counts.apply_effective_batch(candidate)
            check.check(candidate)
        except UserError:  # the recipe cannot use this batch
            continue
        tightest = max(memory.memory(candidate, groups, smaller), key=margin.tightness)
        recipe_args = {
            key: args[key] for key in (BATCH, CHECKPOINTING, ACCUMULATION) if key in args
        }
        sizes = {"planned_gb": tightest.allocated_gb, "capacity_gb": tightest.capacity_gb}
        candidates.append({"args": recipe_args, **sizes, "fits": tightest.fits})
    return candidates


def experiment(config: Config, command: Sequence[str]) -> dict[str, Any]:
    """Return the config groups and values of an experiment file that runs the untuned recipe.

    `command` has the tuning run's overrides. With smoke=true, compose them again, because `config`
    is scaled down.
    """
    if config.smoke:
        config = dataclasses.replace(compose(command), smoke=False)
    trial = recipe(config)
    if trial is None:
        raise UserError(f"{' '.join(command)}: this is not a tuning run. Use: method=tune/<name>.")
    groups = {group: str(getattr(trial, group).name) for group in GROUPS}
    defaults = _defaults(trial, trial.method.name)
    values = {}
    for key in (*GROUPS, *KEYS):
        changes = _changes(plain(getattr(trial, key)), plain(getattr(defaults, key)))
        if changes not in (None, {}):
            values[key] = changes
    if trial.method.measures_machine and trial.hardware.vendor == Vendor.none:
        values["smoke"] = True  # a CPU cannot run it otherwise
    return {"groups": groups, "values": values}


@functools.cache
def _composed(*groups: tuple[str, str]) -> Config:
    """Return the composition of the groups alone. Callers must not change it."""
    overrides = [f"{group}={name}" for group, name in groups]
    return compose([*overrides, "runtime=local", "container=none"])


def _defaults(config: Config, method: str) -> Config:
    """Return the composition of `config`'s groups with another method and no other overrides."""
    names = {group: str(getattr(config, group).name) for group in GROUPS} | {"method": method}
    return _composed(*names.items())


def _changes(value: Any, default: Any) -> Any:
    """Return the nested values that differ from the default; None for an equal value."""
    if isinstance(value, dict) and isinstance(default, dict):
        changes = {key: _changes(v, default.get(key)) for key, v in value.items()}
        return {
            key: change
            for key, change in changes.items()
            if change not in (None, {}) or (key in default and value[key] != default[key])
        }
    return None if value == default else value
