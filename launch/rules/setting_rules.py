"""Reject the conflicts of conflicts.yaml and the keys without an effect of unread.yaml."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

from launch.config.compose import leaf
from launch.config.conditions import Facts, all_met, setting, table
from launch.estimate.rank_state import generates_with_vllm, upcasts_weights
from launch.inputs.model_path import file
from launch.machine import placement
from launch.rules.data import first_metric
from launch.rules.refusal import Refusal
from launch.rules.runtime import runtime_as
from launch.rules.topology import has_split, has_vllm, multi_gpu_topologies
from launch.schema import Config
from launch.schema.enums import Link
from launch.schema.trainer_args import known, value_or_none
from launch.schema.variables import is_expandable

DEFAULTS = Config()
CORES = ("--exclusive", "--cpus-per-task", "--cpus-per-gpu")  # options that request cores
FULLY_LINKED = ("gfx942", "gfx950")  # boards with a link between every two GPUs
# Keys that only qualify another key, so messages show the other key.
SHOWN = {
    "data.kind": "data.name",
    "method.rows": "method.name",
    "method.tunes": "method.name",
    "hardware.vendor": "hardware.name",
}


def board(config: Config) -> int:
    """Return the number of GPUs on a fully linked board: four MI300A, or eight others."""
    return 4 if config.hardware.unified_memory else 8


# Conditions and values in the tables that are not keys of the composition.
FACTS: Facts = {
    "requests_cores": lambda c: any(
        name.startswith(option.partition("=")[0])
        for option in c.runtime.slurm.options
        for name in CORES
    ),
    "first_metric": first_metric,
    "first_precision": lambda c: next(iter(c.hardware.precisions), "fp32"),
    "generates_with_vllm": generates_with_vllm,
    "has_idle_links": lambda c: (
        c.hardware.link == Link.xgmi
        and c.hardware.gfx in FULLY_LINKED
        and 1 < placement.trainers_of_a_node(c) < board(c)
    ),
    "has_own_reward": lambda c: any("." in name for name in c.method.rewards),
    "has_precision": lambda c: c.precision.name in c.hardware.precisions,
    "has_vllm": has_vllm,
    "hub_id_of_file": lambda c: file(c.model.name).get("hub_id"),
    "is_expandable": lambda c: any(map(is_expandable, c.user_env.values())),
    "upcasts_weights": upcasts_weights,
    "makes_rows": lambda c: c.method.tunes and value_or_none(c, "rows") == "full",
    "ranks": placement.num_trainers,
    "reads_data": lambda c: c.method.reads("data"),
    "reads_model": lambda c: c.method.reads("model"),
    # An export without an adapter reads method.args.weights instead.
    "reads_precision": lambda c: (
        c.smoke
        or (c.method.reads("precision") and not (c.method.exports and c.adapter.name == "none"))
    ),
    "revision_of_file": lambda c: file(c.model.name).get("revision"),
    "trains_sums": lambda c: (
        c.method.trains
        and c.data.kind == "reasoning"
        and all(task.name == "basic_arithmetic" for task in c.data.tasks)
    ),
    "shares_gpu": placement.shares_gpu,
}


def conflicts(config: Config) -> Iterator[Refusal]:
    for row in table(__file__, "conflicts"):
        if not (
            all_met(config, row["settings"], FACTS) and all_met(config, row.get("when", {}), FACTS)
        ):
            continue
        choices = row.get("any", {}).items()
        keys = [
            *row["settings"],
            *(key for key, value in choices if all_met(config, {key: value}, FACTS)),
        ]
        if len(keys) > len(row["settings"]) or not choices:
            shown = " with ".join(_shown(config, SHOWN.get(key, key)) for key in keys)
            yield Refusal(row["rule"], f"{shown}: {row['why']}", row["use"])


def _shown(config: Config, key: str) -> str:
    value = setting(config, key, FACTS)
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key.removesuffix('.name')}={text}"


def unread(config: Config) -> Iterator[Refusal]:
    for row in table(__file__, "unread"):
        yield from unread_row(config, row)


def unread_row(config: Config, row: dict[str, Any]) -> Iterator[Refusal]:
    """Yield a refusal if a key of the row is set but takes no effect."""
    read = row["read"] if isinstance(row["read"], list) else [row["read"]]
    if any(all_met(config, conditions, FACTS) for conditions in read):
        return
    defaults = {
        key: default for key in row["keys"].split() for key, default in _changed(config, key, row)
    }
    if not defaults:
        return
    needs, why = _needs(config, row.get("needs", "")), row.get("why")
    names = [_shown(config, k) if why or k.endswith(".name") else k for k in defaults]
    remedy = " ".join(_reset(config, key, default) for key, default in defaults.items())
    remedy = f"{needs}, or {remedy}" if needs else remedy
    without = f"without {needs}" if needs else f"with method={config.method.name}"
    effect = f": {why}" if why else f" take{'s' * (len(defaults) == 1)} no effect {without}"
    yield Refusal(
        "unread",
        f"{', '.join(names)}{effect}",
        remedy + (f"; {row['note']}" if "note" in row else ""),
    )


def _changed(config: Config, key: str, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key, at or below `key`, that differs from its default, and that default.

    TRL's arguments have no default here, so every value differs.
    """
    value, default = leaf(config, key), row.get("default")
    if "default" not in row and not key.startswith("method.args."):
        default = leaf(DEFAULTS, key)
    elif isinstance(default, str) and default.startswith("fact."):
        default = setting(config, default, FACTS)
    elif "default" not in row and config.method.config_class.startswith("recipes."):
        default = known(config).get(key.rpartition(".")[2], {}).get("default")
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if getattr(value, field.name) != (of_field := getattr(default, field.name)):
                yield f"{key}.{field.name}", of_field
    elif value != default and not (value is None and key.startswith("method.args.")):
        yield key, default


def _reset(config: Config, key: str, default: Any) -> str:
    """Return the override that restores a key's default, even if a file sets the key."""
    if key.startswith("method.args."):
        return f"'~{key}'"
    if isinstance(default, dict):
        return " ".join(f"'~{key}.{name}'" for name in setting(config, key, FACTS))
    default = default.name if isinstance(default, Enum) else default
    value = default if isinstance(default, str) else json.dumps(default)
    return f"{key.removesuffix('.name')}={value}"


def _needs(config: Config, needs: str | list[str]) -> str:
    """Return the override that makes a key take effect; for a list, the possible ones."""
    if isinstance(needs, list):
        topologies = [*multi_gpu_topologies(config), *(["colocate"] if has_split(config) else [])]
        possible = [f"topology={name}" for name in topologies]
        if "engine" in known(config) and config.hardware.vllm:
            possible.append("method.args.engine=vllm")
        return " or ".join(override for override in needs if override in possible)
    if needs.startswith("fact."):
        return str(setting(config, needs, FACTS))
    return runtime_as(config, "docker") if needs == "runtime=docker" else needs
