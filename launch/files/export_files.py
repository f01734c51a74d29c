"""What an export reads and needs of this machine: the run it is made from, an evaluation, a converter, a token."""

from __future__ import annotations

import os
from pathlib import Path

from launch.errors import UserError
from launch.files.data_files import check_is_file
from launch.files.rundir import read_json
from launch.pipelines.cycle_choice import recorded
from launch.rules.export import TOKEN, exports
from launch.schema import Config
from launch.trainer_args import argument


def check_export(config: Config) -> None:
    """Files and variables that an export needs. Raises UserError."""
    if not exports(config):
        return
    converter, evaluation, target = (argument(config, name) for name in ("gguf_converter", "results_from", "push_to"))
    if converter is not None:
        check_is_file("method.args.gguf_converter", Path(converter))
    if evaluation is not None:
        _check_evaluation(config, Path(evaluation))
    if target is not None and not os.environ.get(TOKEN):
        raise UserError(f"method.args.push_to={target}: {TOKEN} is not set in your shell. Use: export {TOKEN}=<one that may write>.")


def _check_evaluation(config: Config, run: Path) -> None:
    """It is done, and of the model that is exported: another's figures on a card would be a lie."""
    result, record = read_json(run / "result.json") or {}, read_json(run / "record.json") or {}
    composition = record.get("composition")
    if result.get("status") != "done" or not isinstance(composition, dict) or not ("accuracy" in result or "lm_eval" in result):
        raise UserError(f"method.args.results_from={run}: no evaluation that is done. Use: a run of method=evaluate.")
    model = composition.get("model")
    if not isinstance(model, dict) or not all(isinstance(model.get(key, 0), str | None) for key in ("path", "hub_id")):
        raise UserError(f"method.args.results_from={run}: its record.json does not say of which model. Use: a run of this version.")
    adapter = config.adapter.path  # its run left the merged model, and that is what was measured
    path = str(Path(adapter).resolve().with_name("model")) if adapter else config.model.path
    measured = _named(model["path"], model["hub_id"], model.get("revision"))
    exported = _named(path, config.model.hub_id, config.model.revision)
    if measured != exported:
        raise UserError(
            f"method.args.results_from={run}: an evaluation of {measured}, not of {exported}. Use: one of the model that is exported."
        )


def _named(path: str | None, hub_id: str | None, revision: str | None) -> str:
    """A model by its place: of a directory the same, whatever links lead to it."""
    if path:
        return str(Path(path).resolve())
    return f"{hub_id} at {revision}" if hub_id else "random weights"


def check_not_a_run(path: Path) -> None:
    """Raises UserError where model.path names a run that has left no model, or an adapter by itself."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"model.path={path} is an adapter, not a model. Use: model.path=<its base> adapter=<its kind> adapter.path={path}, "
            "or the model/ of its run, where it is merged."
        )
    record = read_json(path.parent / "record.json")
    if path.name != "model" or path.is_dir() or record is None:
        return
    run = path.parent
    if "phases" in record:
        chosen = [choice["model"] for choice in recorded(record)]  # of RAFT's cycles
        names = [*chosen, *(name for name in record["phases"].values() if name not in chosen)]
        models = [f"model.path={run / name}" for name in names if (run / name / "model").is_dir()]
        raise UserError(f"model.path={run}: a pipeline, whose phases have the models. Use: {' or '.join(models) or 'its command again'}.")
    if record.get("status") == "done":
        raise UserError(f"model.path={run}: that run is done and has left no model. Use: the run that trained it.")
    whole = [
        f
        for f in run.glob("checkpoints/checkpoint-*")
        if f.name.rpartition("-")[2].isdigit() and (f / "manifest.json").is_file() and (f / "config.json").is_file()
    ]
    newest = max(whole, key=lambda f: int(f.name.rpartition("-")[2]), default=None)
    raise UserError(
        f"model.path={run}: that run has left no model (its status: {record.get('status')}). Use: its command again, which finishes it"
        + (f"; or model.path={newest}, its newest checkpoint." if newest else ".")
    )
