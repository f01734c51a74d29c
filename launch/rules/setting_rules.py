"""Reject settings by two tables: conflicts.yaml and unread.yaml, whose headers define a row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

from launch.config.compose import leaf
from launch.config.conditions import Facts, all_met, setting, table
from launch.estimate.rank_memory import generates_with_vllm, upcasts_weights
from launch.machine import placement
from launch.rules.data import first_metric
from launch.rules.refusal import Refusal
from launch.rules.runtime import runtime_as
from launch.rules.topology import has_split, has_vllm, several
from launch.schema import Config
from launch.schema.enums import Link
from launch.schema.trainer_args import argument, known
from launch.schema.variables import is_expandable

DEFAULTS = Config()
CORES = ("--exclusive", "--cpus-per-task", "--cpus-per-gpu")  # options that give a job more cores
LINKED = ("gfx942", "gfx950")
# Keys that only qualify another key, so messages show the other key.
SHOWN = {
    "data.kind": "data.name",
    "method.rows": "method.name",
    "method.tunes": "method.name",
    "hardware.vendor": "hardware.name",
}


def _reads_precision(config: Config) -> bool:
    copies = config.method.exports and config.adapter.name == "none"  # in method.args.weights
    return config.smoke or (config.method.reads("precision") and not copies)


def _asks_for_cores(config: Config) -> bool:
    names = [option.partition("=")[0] for option in config.runtime.slurm.options]
    return any(cores.startswith(name) for name in names for cores in CORES)


def board(config: Config) -> int:
    """Return the GPUs of a board: MI300A come in fours, others in eights, all linked."""
    return 4 if config.hardware.unified_memory else 8


def _has_idle_links(config: Config) -> bool:
    """Return whether GPUs of a fully linked board are left out of collectives."""
    hardware, ranks = config.hardware, placement.trainers_of_a_node(config)
    is_linked = hardware.link == Link.xgmi and hardware.gfx in LINKED
    return is_linked and 1 < ranks < board(config)


# Conditions and values that are not keys of the composition.
FACTS: Facts = {
    "asks_for_cores": _asks_for_cores,
    "first_metric": first_metric,
    "first_precision": lambda c: next(iter(c.hardware.precisions), "fp32"),
    "generates_with_vllm": generates_with_vllm,
    "has_idle_links": _has_idle_links,
    "has_own_reward": lambda c: any("." in name for name in c.method.rewards),
    "has_precision": lambda c: c.precision.name in c.hardware.precisions,
    "has_vllm": has_vllm,
    "is_expandable": lambda c: any(map(is_expandable, c.user_env.values())),
    "upcasts_weights": upcasts_weights,
    "makes_rows": lambda c: c.method.tunes and argument(c, "rows") == "full",
    "ranks": placement.num_trainers,
    "reads_data": lambda c: c.method.reads("data"),
    "reads_model": lambda c: c.method.reads("model"),
    "reads_precision": _reads_precision,
    "shares_gpu": placement.shares_gpu,
}


def conflicts(config: Config) -> Iterator[Refusal]:
    for row in table(__file__, "conflicts"):
        if not (
            all_met(config, row["settings"], FACTS) and all_met(config, row.get("when", {}), FACTS)
        ):
            continue
        choices = row.get("any", {}).items()
        keys = [*row["settings"], *(key for key, a in choices if all_met(config, {key: a}, FACTS))]
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
    """Yield a refusal if a key of the row is given but not read."""
    read = row["read"] if isinstance(row["read"], list) else [row["read"]]
    if any(all_met(config, conditions, FACTS) for conditions in read):
        return
    values = {
        key: usual for key in row["keys"].split() for key, usual in _unusual(config, key, row)
    }
    if not values:
        return
    needs, why = _needs(config, row.get("needs", "")), row.get("why")
    names = [_shown(config, k) if why or k.endswith(".name") else k for k in values]
    remedy = " ".join(_reset(config, key, usual) for key, usual in values.items())
    remedy = f"{needs}, or {remedy}" if needs else remedy
    without = f"without {needs}" if needs else f"with method={config.method.name}"
    effect = f": {why}" if why else f" take{'s' * (len(values) == 1)} no effect {without}"
    yield Refusal(
        "unread",
        f"{', '.join(names)}{effect}",
        remedy + (f"; {row['note']}" if "note" in row else ""),
    )


def _unusual(config: Config, key: str, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key, at or below `key`, that differs from its usual value, and that value.

    TRL's arguments have no usual value, so any value counts.
    """
    value, usual = leaf(config, key), row.get("usual")
    if "usual" not in row and not key.startswith("method.args."):
        usual = leaf(DEFAULTS, key)
    elif isinstance(usual, str) and usual.startswith("fact."):
        usual = setting(config, usual, FACTS)
    elif "usual" not in row and config.method.config_class.startswith("recipes."):
        usual = known(config).get(key.rpartition(".")[2], {}).get("default")
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if getattr(value, field.name) != (default := getattr(usual, field.name)):
                yield f"{key}.{field.name}", default
    elif value != usual and not (value is None and key.startswith("method.args.")):
        yield key, usual


def _reset(config: Config, key: str, usual: Any) -> str:
    """Return the override that undoes a key, also one that a file sets."""
    if key.startswith("method.args."):
        return f"'~{key}'"
    if isinstance(usual, dict):
        return " ".join(f"'~{key}.{name}'" for name in setting(config, key, FACTS))
    usual = usual.name if isinstance(usual, Enum) else usual
    value = usual if isinstance(usual, str) else json.dumps(usual)
    return f"{key.removesuffix('.name')}={value}"


def _needs(config: Config, needs: str | list[str]) -> str:
    """Return the overrides that make something read a key; of a list, those possible here."""
    if isinstance(needs, list):
        topologies = [*several(config), *(["colocate"] if has_split(config) else [])]
        possible = [f"topology={name}" for name in topologies]
        if "engine" in known(config) and config.hardware.vllm:
            possible.append("method.args.engine=vllm")
        return " or ".join(override for override in needs if override in possible)
    if needs.startswith("fact."):
        return str(setting(config, needs, FACTS))
    return runtime_as(config, "docker") if needs == "runtime=docker" else needs
