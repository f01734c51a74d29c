"""Whether the model in `model.path` is the one that the plan goes by: its config.json beside the shape of the composition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from launch.environment import ROOT
from launch.schema import Config

# Key of model -> transformers' name in config.json
SHAPE = {
    "architecture": "model_type",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}


def warnings(config: Config) -> list[str]:
    """One where memory, speed and the arguments of the model's group are those of another model; none where config.json cannot be read,
    which a run refuses, and under smoke=true, where phases before have made the model small."""
    own = _shape(Path(config.model.path)) if config.model.path and not config.smoke else {}
    other = {key: value for key, value in own.items() if value != getattr(config.model, key)}
    if not other:
        return []
    groups = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "conf/model").glob("*.yaml"))}
    like = [f"model={name}" for name, group in groups.items() if all(group.get(key) == value for key, value in own.items())]
    has = ", ".join(f"{key} {value}" for key, value in other.items())
    goes_by = ", ".join(str(getattr(config.model, key)) for key in other)
    remedy = " or ".join(like) or "the model= next to it, with its own model.num_layers and so on"
    return [
        f"model.path={config.model.path}: {has} by its config.json, and the plan and the defaults of method.args go by "
        f"model={config.model.name}: {goes_by}. Use: {remedy}."
    ]


def _shape(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: found[name] for key, name in SHAPE.items() if name in found} if isinstance(found, dict) else {}
