"""What a tuning (method=tune/...) needs of the launcher: the recipe that it tunes, composed and checked as for a run of its own, what the
memory planner says of each candidate, and what an experiment file must say to start that recipe.

Arguments under method.args that are none of the tuning's own are the recipe's: `method=tune/batch method.args.max_length=4096`, and so
`experiment=NAME method=tune/batch` tunes the recipe of an experiment.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import batch, check, topology, trainer_args
from launch.compose import compose
from launch.errors import UserError
from launch.files import paths
from launch.machine.detect import Host
from launch.planner import margin, memory
from launch.schema import Config
from launch.schema.enums import Vendor

GROUPS = ("hardware", "model", "method", "adapter", "precision", "topology", "data", "tracking")
# Keys beside the groups that belong to what is tuned. Not where it ran: runtime and container follow from the hardware.
KEYS = ("user_env", "effective_batch", "seed")
BATCH, CHECKPOINTING, ACCUMULATION = "per_device_train_batch_size", "gradient_checkpointing", "gradient_accumulation_steps"


def recipe(config: Config) -> Config | None:
    """The composition of what a tuning runs in its trials; None for every other method. Raises UserError."""
    name = trainer_args.recipe_name(config)
    if name is None:
        return None
    method, own = _standard(config, name).method, trainer_args.own(config)
    given = {key: value for key, value in config.method.args.items() if key not in own}
    args = {**method.args, **(method.smoke if config.smoke else {}), **given}
    if config.smoke:
        args.pop("num_train_epochs", None)  # a trial is bounded by its steps
    rewards = config.method.rewards or method.rewards
    found = dataclasses.replace(config, method=dataclasses.replace(method, args=args, rewards=rewards))
    batch.apply_effective_batch(found)
    return found


def check_recipe(config: Config) -> None:
    """Raises UserError for what the recipe would be refused for by itself."""
    tuned = recipe(config)
    if tuned is None:
        return
    if "rows" in trainer_args.own(config) and tuned.method.kind != "trainer":
        raise UserError(f"method.args.recipe={tuned.method.name}: {config.method.name} measures training steps. Use: sft, dpo or grpo.")
    try:
        check.check(tuned)
    except UserError as error:  # of the recipe, which is not the method that was asked for
        raise UserError(f"method={config.method.name} has {tuned.method.name} for its trials: {error}") from error


def for_ranks(config: Config, host: Host, run_dir: Path, ports: tuple[int, int]) -> dict[str, Any] | None:
    """`tuned` in the file that ranks read: the recipe's method and arguments, and where tuned files outlive the run."""
    tuned = recipe(config)
    if tuned is None:
        return None
    cache = paths.home(config, host) if config.runtime.on_node == "docker" else paths.cache_dir(host) / "rocm-recipes"
    return {
        "method": tuned.method,
        "trainer_args": trainer_args.complete(tuned, run_dir, ports),
        "cache": str(cache),
        "planned": planned(config, tuned, host, run_dir),
    }


def planned(config: Config, tuned: Config, host: Host, run_dir: Path) -> list[dict[str, Any]]:
    """Each candidate of tune/batch with what the memory planner says: GB of the process with least to spare."""
    if "batches" not in trainer_args.own(config):
        return []
    processes = topology.processes(tuned, host, run_dir)
    smaller, found = memory.measured(tuned, processes, host), []
    own = trainer_args.value(tuned, CHECKPOINTING), trainer_args.value(tuned, BATCH)  # the recipe as it stands is one of them
    pairs = itertools.product(trainer_args.value(config, "checkpointing"), trainer_args.value(config, "batches"))
    for checkpointing, size in sorted({own, *pairs}):
        args = {**tuned.method.args, BATCH: size, CHECKPOINTING: checkpointing}
        candidate = dataclasses.replace(tuned, method=dataclasses.replace(tuned.method, args=args))
        try:
            batch.apply_effective_batch(candidate)
            check.check(candidate)
        except UserError:  # the recipe as it stands was checked before; a batch that it cannot take is no candidate
            continue
        most = max(memory.memory(candidate, processes, smaller), key=margin.tightness)
        kept = {key: args[key] for key in (BATCH, CHECKPOINTING, ACCUMULATION) if key in args}
        found.append({"args": kept, "planned_gb": most.allocated_gb, "capacity_gb": most.capacity_gb, "fits": most.fits})
    return found


def experiment(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """Groups and values that make the recipe as it was before the tuning: each group by its name, then what differs from that.

    Under smoke=true the composition is made again from the `overrides`: what ran was scaled down.
    """
    tuned = recipe(dataclasses.replace(compose([*overrides]), smoke=False) if config.smoke else config)
    if tuned is None:
        raise UserError(f"{' '.join(overrides)}: names no tuning")
    groups = {group: str(getattr(tuned, group).name) for group in GROUPS}
    standard = _standard(tuned, tuned.method.name)
    values = {}
    for key in (*GROUPS, *KEYS):
        differing = _differing(_plain(getattr(tuned, key)), _plain(getattr(standard, key)))
        if differing not in (None, {}):
            values[key] = differing
    if tuned.method.kind == "bench" and tuned.hardware.vendor == Vendor.none:
        values["smoke"] = True  # a CPU runs it no other way
    return {"groups": groups, "values": values}


def _standard(config: Config, method: str) -> Config:
    return _composed(*((group, method if group == "method" else str(getattr(config, group).name)) for group in GROUPS))


@functools.cache
def _composed(*groups: tuple[str, str]) -> Config:
    """What the groups say by themselves; read it only."""
    return compose([*(f"{group}={name}" for group, name in groups), "runtime=local", "container=none"])


def _plain(node: Any) -> Any:
    from launch.plan import plain  # which imports this module

    return plain(node)


def _differing(mine: Any, standard: Any) -> Any:
    """What of `mine` is other than in `standard`, as nested keys; None where nothing is."""
    if isinstance(mine, dict) and isinstance(standard, dict):
        found = {key: _differing(value, standard.get(key)) for key, value in mine.items()}
        return {key: value for key, value in found.items() if value not in (None, {}) or (key in standard and mine[key] != standard[key])}
    return None if mine == standard else mine
