"""Find the model that a run or a pipeline left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.core.json_files import read_json
from launch.inputs.paths import real_folder
from launch.schema.cycle_choice import recorded


def phases_with_model(run: Path, record: Mapping[str, Any]) -> list[Path]:
    """Return the phases of a pipeline that left a model: those that RAFT chose, then by order."""
    names = [*(choice["model"] for choice in recorded(record)), *record.get("phases", {}).values()]
    return [run / name for name in dict.fromkeys(names) if (run / name / "model").is_dir()]


def run_with_model(run: Path) -> Path | None:
    """Return the directory with a run's resulting model, or None if there is no model.

    For a pipeline, this is the phase that RAFT chose, or else the last phase with a model.
    """
    record = read_json(run / "record.json") or {}
    phases = phases_with_model(run, record)
    if phases:
        return real_folder(phases[0 if recorded(record) else -1])
    return run if (run / "model").is_dir() else None
