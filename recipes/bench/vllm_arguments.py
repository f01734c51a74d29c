"""Turn arguments of vLLM's engine into a command line, and name replacements of removed ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
REMOVED: dict[str, str] = _TABLE["removed"]
REFUSED = {name: f"is gone from vLLM. Instead: {what}." for name, what in REMOVED.items()}
REFUSED |= {
    name: f"is decided elsewhere; set {what} instead." for name, what in _TABLE["owned"].items()
}
OURS = ("label", "instances")  # keys of a setting that vLLM does not see
WIDTHS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def name_of(setting: Mapping[str, Any]) -> str:
    if "label" in setting:
        return str(setting["label"])
    words = [
        f"{key}={json.dumps(value) if isinstance(value, dict) else value}"
        for key, value in setting.items()
    ]
    return " ".join(words) or "vLLM's own"


def argv_of(setting: Mapping[str, Any]) -> list[str]:
    """Return options as vLLM's parser expects them; null is left out.

    true and false become --flag and --no-flag, mappings JSON. launch/inputs/engine_args.py does the
    same for a run's engine.
    """
    argv: list[str] = []
    for name, value in setting.items():
        option = name.replace("_", "-")
        if name in OURS or name.isupper() or value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, (list, tuple)):
            argv += [f"--{option}", *map(str, value)]
        else:
            argv += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return argv


def env_of(setting: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(value) for name, value in setting.items() if name.isupper() and value is not None
    }


def gpus_of(setting: Mapping[str, Any]) -> int:
    """Return the number of GPUs of one engine."""
    return math.prod(int(setting.get(name) or 1) for name in WIDTHS)
