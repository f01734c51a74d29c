"""Collect the runs that produced a model, and its evaluation, for the card of method=export.

The launcher reads them and passes them in config.yaml, because containers do not mount the
directories of other runs.
"""

import sys
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from launch.core.json_files import plain, read_json
from launch.plan.resuming import recorded_config
from launch.schema import Config
from launch.schema.trainer_args import value_or_none

COMPOSITION_KEYS = ("model", "adapter", "precision", "data", "seed")
PACKAGES = ("torch", "transformers", "trl", "peft", "vllm")
RESULT_KEYS = "steps loss reward weights_sha256 weights_error merge_error data_sha256".split()
EVALUATION_KEYS = (
    "accuracy reward interval num_problems num_samples samples_per_prompt by_task data_sha256 "
    "pass_at_k pass_at_k_interval maj_at_k maj_at_k_interval lm_eval"
).split()


def of(config: Config) -> dict[str, Any]:
    """Return the runs behind the model, newest first, and the results of its evaluation.

    method.args.results_from is the run directory of the evaluation.
    """
    results, evaluation = None, value_or_none(config, "results_from")
    if evaluation:
        run = Path(evaluation)
        record, result = read_json(run / "record.json") or {}, read_json(run / "result.json") or {}
        composition = _table(record, "composition")
        results = {
            "run": run.name,
            "data": composition.get("data"),
            "args": _table(_table(composition, "method"), "args"),
            **{key: result[key] for key in EVALUATION_KEYS if key in result},
        }
    return {"runs": runs_behind(config.adapter.path or config.model.path), "results": results}


def run_of(path: Path) -> Path | None:
    """Return the run that wrote this model, adapter or checkpoint; None if it has no record."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    is_output = path.name in ("model", "adapter") or run != path.parent
    return run if is_output and (run / "record.json").is_file() else None


def runs_behind(path: str | None) -> list[dict[str, Any]]:
    """Return the runs that led to `path`, oldest last.

    Stop at a model that no run made, and at a run with a damaged record.
    """
    runs: list[dict[str, Any]] = []
    visited: set[Path] = set()
    while path is not None and (run := run_of(Path(path))) is not None and run not in visited:
        visited.add(run)
        record, result = read_json(run / "record.json") or {}, read_json(run / "result.json") or {}
        try:
            composition = plain(recorded_config(record["composition"]))
        except (LookupError, AttributeError, OmegaConfBaseException) as error:
            effect = "the model card omits that run and those before it"
            effect += "" if runs else ", and the weights are not checked against its record"
            print(
                f"warning: {run / 'record.json'}: this version cannot read its composition "
                f"({str(error).splitlines()[0]}). Therefore, {effect}.",
                file=sys.stderr,
            )
            return runs
        packages, data = _table(record, "packages"), _table(record, "data")
        runs.append(
            {
                "run": run.name,
                "left": Path(path).name,
                "method": composition["method"]["name"],
                "overrides": record.get("overrides", []),
                **{key: composition[key] for key in COMPOSITION_KEYS},
                "args": composition["method"]["args"],
                "data_files": _table(data, "files"),
                "code": _table(record, "code"),
                "packages": {name: packages[name] for name in PACKAGES if name in packages},
                "result": {key: result[key] for key in RESULT_KEYS if key in result},
            }
        )
        path = composition["adapter"]["path"] or composition["model"]["path"]
    return runs


def _table(record: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping at `key`; {} if the value is not a mapping."""
    table = record.get(key)
    return table if isinstance(table, dict) else {}
