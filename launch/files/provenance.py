"""What a model was made by: the runs behind it and an evaluation of it, from their records, for the model card of method=export.

Read when the run starts and handed to its rank in config.yaml: a container is not given the directories of other runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from launch.files.resuming import recorded_config
from launch.files.rundir import read_json
from launch.plan import plain
from launch.schema import Config
from launch.trainer_args import argument

PACKAGES = ("torch", "transformers", "trl", "peft", "vllm")
OF_RESULT = ("steps", "loss", "reward", "weights_sha256", "weights_error", "merge_error", "data_sha256")
OF_EVALUATION = (
    *("accuracy", "interval", "num_problems", "num_samples", "samples_per_prompt", "by_task", "data_sha256"),
    *("pass_at_k", "pass_at_k_interval", "maj_at_k", "maj_at_k_interval", "lm_eval"),
)


def of(config: Config) -> dict[str, Any] | None:
    """`runs`, the newest first, and `results` of the evaluation of method.args.results_from; None for a method that exports nothing."""
    if config.method.kind != "exporter":
        return None
    evaluation = argument(config, "results_from")
    return {"runs": _runs(config.adapter.path or config.model.path), "results": _evaluation(Path(evaluation)) if evaluation else None}


def run_of(path: Path) -> Path | None:
    """The run that left this model, adapter or checkpoint; None where there is no record of one."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    named = path.name in ("model", "adapter") or run != path.parent
    return run if named and (run / "record.json").is_file() else None


def _composition(record: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError where the record holds none of this version."""
    if not isinstance(record.get("composition"), dict):
        raise ValueError("there is none, or the file is damaged")
    try:
        found: dict[str, Any] = plain(recorded_config(record["composition"]))
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    return found


def _runs(path: str | None) -> list[dict[str, Any]]:
    """From the run that left `path` back to the first one whose model came from elsewhere, or whose record cannot be read."""
    found: list[dict[str, Any]] = []
    seen: set[Path] = set()
    while path is not None and (run := run_of(Path(path))) is not None and run not in seen:
        seen.add(run)
        record, result = read_json(run / "record.json") or {}, read_json(run / "result.json") or {}
        try:
            composition = _composition(record)
        except ValueError as error:
            lost = "that run and those before it are not on the model card"
            lost += "" if found else ", and the weights are not compared with what it left"
            print(f"warning: {run / 'record.json'} has no composition of this version ({error}): {lost}.", file=sys.stderr)
            return found
        packages, data = _table(record, "packages"), _table(record, "data")
        found.append(
            {
                "run": run.name,
                "left": Path(path).name,
                "method": composition["method"]["name"],
                "overrides": record.get("overrides", []),
                **{key: composition[key] for key in ("model", "adapter", "precision", "data", "seed")},
                "args": composition["method"]["args"],
                "data_files": _table(data, "files"),
                "code": _table(record, "code"),
                "packages": {name: packages[name] for name in PACKAGES if name in packages},
                "result": {key: result[key] for key in OF_RESULT if key in result},
            }
        )
        path = composition["adapter"]["path"] or composition["model"]["path"]
    return found


def _evaluation(run: Path) -> dict[str, Any]:
    record, result = read_json(run / "record.json") or {}, read_json(run / "result.json") or {}
    composition = _table(record, "composition")
    return {
        "run": run.name,
        "data": composition.get("data"),
        "args": _table(_table(composition, "method"), "args"),
        **{key: result[key] for key in OF_EVALUATION if key in result},
    }


def _table(record: dict[str, Any], key: str) -> dict[str, Any]:
    """Empty where another version, or another tool, wrote something else there."""
    found = record.get(key)
    return found if isinstance(found, dict) else {}
