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
    """Return the run whose model is the result: `run`, or a phase of it; None if there is none.

    It is the model that RAFT chose, or that of the last phase.
    """
    record = read_json(run / "record.json") or {}
    phases = phases_with_model(run, record)
    if phases:
        return real_folder(phases[0 if recorded(record) else -1])
    return run if (run / "model").is_dir() else None
