"""Decide whether two compositions describe the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from launch.core.json_files import plain
from launch.inputs.tracking import package_of
from launch.schema import Config, Properties

# Keys without influence on what is computed. Compositions that differ only in these are the same
# run.
NOT_IDENTITY = {
    *("mode", "find", "price_per_gpu_hour", "format", "verbose", "resume", "run_root", "name"),
    *("sweep", "preflight", "speed_keeps", "hardware_report", "followed"),
}
# Keys that follow from the name of the method.
PROPERTIES = tuple(field.name for field in dataclasses.fields(Properties))
HASH = re.compile(rb'"composition_hash":\s*"([0-9a-f]{64})"')
REMOVED_KEY = "loss_scaling"  # of precision, in records of earlier versions
# Curricula that divide the data among RAFT's cycles, so a cycle depends on the number of cycles.
CURRICULA_BY_CYCLE = ("progressive", "mixed")


def default_name(config: Config) -> str:
    """Return the default name of a run: <method>-<model>-<hardware>, plus -smoke for smoke=true."""
    parts = [
        config.method.name.replace("/", "-"),
        config.model.name if config.method.uses_model else "",
        config.hardware.name,
        "smoke" if config.smoke else "",
    ]
    return "-".join(filter(None, parts))


def has_phases(config: Config) -> bool:
    """Return whether the composition is a pipeline of several runs (launch/study/pipeline.py)."""
    return bool(config.phases) or config.method.has_cycles


def composition(config: Config) -> dict[str, Any]:
    """Return the composition that a record stores to make the run repeatable."""
    return {key: value for key, value in plain(config).items() if key not in NOT_IDENTITY}


def without_removed_keys(composition: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded composition without keys that the schema no longer has."""
    precision = composition.get("precision")
    if not isinstance(precision, dict):  # a damaged record
        return composition
    settings = {name: value for name, value in precision.items() if name != REMOVED_KEY}
    return {**composition, "precision": settings}


def identity(composition: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values that are equal for two compositions of the same run.

    For the runtime, only its name and number of nodes are compared. A tracker's package is filled
    in, because earlier records contain it. For a sampling, the number of RAFT's cycles matters only
    if a curriculum divides the data among them.
    """
    runtime, tracking = composition.get("runtime", {}), composition.get("tracking", {})
    package = tracking.get("package") or package_of(tracking.get("name", "none"))
    keys = {k: v for k, v in without_removed_keys(composition).items() if k != "chosen"}
    # Undo the choices of speed=auto, so that another version of the planner finds earlier runs.
    for choice in reversed(composition.get("chosen") or []):
        keys = _with_earlier_value(keys, choice["key"].split("."), choice["before"])
    keys |= {
        "runtime": {"name": runtime.get("name"), "nodes": runtime.get("slurm", {}).get("nodes")},
        "tracking": {**tracking, "package": package},
    }
    method = {key: value for key, value in keys.get("method", {}).items() if key not in PROPERTIES}
    curriculum = composition.get("data", {}).get("curriculum")
    if method.get("name") == "sample" and curriculum not in CURRICULA_BY_CYCLE:
        args = method.get("args", {})
        method["args"] = {name: value for name, value in args.items() if name != "num_cycles"}
    return {**keys, "method": method} if method else keys


def _with_earlier_value(node: Any, path: list[str], before: Any) -> Any:
    """Return a copy with `before` at the path; remove an argument whose earlier value is None."""
    name, *rest = path
    if isinstance(node, list):
        number = int(name)
        earlier = _with_earlier_value(node[number], rest, before)
        return [*node[:number], earlier, *node[number + 1 :]]
    if rest:
        return {**node, name: _with_earlier_value(node[name], rest, before)}
    if before is None and name not in ("compile", "rows", "checkpointed_layers", "revision"):
        return {key: value for key, value in node.items() if key != name}
    return {**node, name: before}


def identity_of(config: Config) -> dict[str, Any]:
    """Return the identity in the types of JSON, so that it can be compared with a record's."""
    recorded: dict[str, Any] = json.loads(json.dumps(identity(composition(config))))
    return recorded


def composition_hash(config: Config) -> str:
    return _hash(identity_of(config))


def recorded_hash(record: dict[str, Any]) -> str | None:
    """Return a record's composition hash. Recompute it if the schema has changed since."""
    recorded = record.get("composition")
    if not isinstance(recorded, dict) or without_removed_keys(recorded) == recorded:
        return record.get("composition_hash")
    return _hash(identity(recorded))


def may_have_hash(record: Path, hash_: str) -> bool:
    """Return False if a record.json has other hashes; parsing it would take 30 times longer."""
    try:
        content = record.read_bytes()
    except OSError:
        return True
    hashes = HASH.findall(content)
    return not hashes or hash_.encode() in hashes or REMOVED_KEY.encode() in content


def _hash(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
