"""Decide whether two compositions are the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from launch.core.json_files import plain
from launch.inputs.tracking import package_of
from launch.schema import Config, Properties

# Keys that do not change what is computed. Compositions that differ only in these are the same run.
NOT_IDENTITY = {
    *("mode", "find", "price_per_gpu_hour", "format", "verbose", "resume", "run_root", "name"),
    *("sweep", "preflight", "speed_keeps"),
}
# A method's name implies these keys.
PROPERTIES = tuple(field.name for field in dataclasses.fields(Properties))
# Curricula that divide the data among RAFT's cycles, so that the number of cycles matters to each.
BY_PART = ("progressive", "mixed")


def default_name(config: Config) -> str:
    """Return a run's name: method, model, hardware."""
    parts = [
        config.method.name.replace("/", "-"),
        config.model.name if config.method.uses_model else "",
        config.hardware.name,
        "smoke" if config.smoke else "",
    ]
    return "-".join(filter(None, parts))


def has_phases(config: Config) -> bool:
    """Return whether the composition is a pipeline of runs (launch/study/pipeline.py)."""
    return bool(config.phases) or config.method.has_cycles


def composition(config: Config) -> dict[str, Any]:
    """Return the part of a record from which a run can be repeated."""
    return {key: value for key, value in plain(config).items() if key not in NOT_IDENTITY}


def current(composition: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded composition without keys that the schema no longer has."""
    precision = composition.get("precision") or {}
    settings = {name: value for name, value in precision.items() if name != "loss_scaling"}
    return {**composition, "precision": settings} if precision else composition


def identity(composition: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values that make two runs the same run.

    Of the runtime, only its name and number of nodes count. A tracker's package counts the same
    whether set or implied, because earlier records name it. The number of RAFT's cycles matters to
    a sampling only if a curriculum divides the data among them.
    """
    runtime, tracking = composition.get("runtime", {}), composition.get("tracking", {})
    package = tracking.get("package") or package_of(tracking.get("name", "none"))
    same = {
        **_before_choices(current(composition)),
        "runtime": {"name": runtime.get("name"), "nodes": runtime.get("slurm", {}).get("nodes")},
        "tracking": {**tracking, "package": package},
    }
    method = {key: value for key, value in same.get("method", {}).items() if key not in PROPERTIES}
    curriculum = composition.get("data", {}).get("curriculum")
    if method.get("name") == "sample" and curriculum not in BY_PART:
        args = method.get("args", {})
        method["args"] = {name: value for name, value in args.items() if name != "num_cycles"}
    return {**same, "method": method} if method else same


def _before_choices(composition: dict[str, Any]) -> dict[str, Any]:
    """Undo what speed=auto chose, so that another planner version finds earlier runs."""
    before = {key: value for key, value in composition.items() if key != "chosen"}
    for choice in reversed(composition.get("chosen") or []):
        before = _undone(before, choice["key"].split("."), choice["before"])
    return before


def _undone(node: dict[str, Any], path: list[str], before: Any) -> dict[str, Any]:
    """Return a copy with the earlier value `before`; remove an argument that is not set."""
    name, *rest = path
    if rest:
        return {**node, name: _undone(node[name], rest, before)}
    if before is None and name not in ("compile", "rows", "checkpointed_layers"):
        return {key: value for key, value in node.items() if key != name}
    return {**node, name: before}


def identity_of(config: Config) -> dict[str, Any]:
    """Return the identity as it would be computed from a record."""
    recorded: dict[str, Any] = json.loads(json.dumps(identity(composition(config))))
    return recorded


def composition_hash(config: Config) -> str:
    return _hash(identity_of(config))


def recorded_hash(record: dict[str, Any]) -> str | None:
    """Return the composition hash of a record, as the schema of today computes it."""
    recorded = record.get("composition")
    if not isinstance(recorded, dict) or current(recorded) == recorded:
        return record.get("composition_hash")
    return _hash(identity(recorded))


def _hash(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
