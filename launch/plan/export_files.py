"""Check an export's inputs: the run, the evaluation, the GGUF converter and the hub token."""

from __future__ import annotations

import os
from pathlib import Path

from launch.core.errors import UserError
from launch.core.json_files import read_json
from launch.inputs.jsonl_files import check_is_file
from launch.schema import Config
from launch.schema.cycle_choice import recorded
from launch.schema.trainer_args import argument

TOKEN = "HF_TOKEN"


def check_export(config: Config) -> None:
    """Raise UserError if a file or variable that an export needs is missing."""
    if not config.method.exports:
        return
    converter, evaluation, target = (
        argument(config, name) for name in ("gguf_converter", "results_from", "push_to")
    )
    if converter is not None:
        check_is_file("method.args.gguf_converter", Path(converter))
    if evaluation is not None:
        _check_evaluation(config, Path(evaluation))
    if target is not None and not os.environ.get(TOKEN):
        raise UserError(
            f"method.args.push_to={target}: {TOKEN} is not set in your shell. Use: export "
            f"{TOKEN}=<token with write access>."
        )


def _check_evaluation(config: Config, run: Path) -> None:
    """Raise UserError unless the evaluation is done and measured the model to export.

    The model card must not show the figures of another model.
    """
    result, record = read_json(run / "result.json") or {}, read_json(run / "record.json") or {}
    model = (record.get("composition") or {}).get("model")
    measures = "accuracy" in result or "lm_eval" in result
    if result.get("status") != "done" or not measures or not isinstance(model, dict):
        raise UserError(
            f"method.args.results_from={run}: not a finished evaluation. Use: a run of "
            "method=evaluate."
        )
    adapter = config.adapter.path  # the adapter's run saved the merged model, which was measured
    path = str(Path(adapter).resolve().with_name("model")) if adapter else config.model.path
    measured = _named(model.get("path"), model.get("hub_id"), model.get("revision"))
    exported = _named(path, config.model.hub_id, config.model.revision)
    if measured != exported:
        raise UserError(
            f"method.args.results_from={run}: an evaluation of {measured}, not of {exported}. Use: "
            "one of the model that is exported."
        )


def _named(path: str | None, hub_id: str | None, revision: str | None) -> str:
    """Return a name by which to compare models: the real path, or the hub id and revision."""
    if path:
        return str(Path(path).resolve())
    return f"{hub_id} at {revision}" if hub_id else "random weights"


def check_not_a_run(path: Path) -> None:
    """Raise UserError if model.path names a run without a model, or a bare adapter."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"model.path={path} is an adapter, not a model. Use: model.path=<its base> "
            f"adapter=<its kind> adapter.path={path}, or the model/ of its run, where it is merged."
        )
    run, record = path.parent, read_json(path.parent / "record.json")
    if path.name != "model" or path.is_dir() or record is None:
        return
    # of a pipeline, the models that RAFT's cycles chose come first
    names = [*(choice["model"] for choice in recorded(record)), *record.get("phases", {}).values()]
    models = [run / name / "model" for name in dict.fromkeys(names)]
    # checkpoints that are whole and can serve as a model, the newest first
    folders = {
        int(folder.name.rpartition("-")[2]): folder
        for folder in run.glob("checkpoints/checkpoint-*[0-9]")
        if (folder / "manifest.json").is_file() and (folder / "config.json").is_file()
    }
    models += [folders[step] for step in sorted(folders, reverse=True)[:1]]
    remedies = [f"model.path={m.parent if m.name == 'model' else m}" for m in models if m.is_dir()]
    if record.get("status") != "done" and not ("phases" in record and remedies):
        remedies.insert(0, "its command again, which finishes it")
    raise UserError(
        f"model.path={run}: that run has no model (its status: "
        f"{record.get('status')}). Use: {' or '.join(remedies) or 'the run that trained it'}."
    )
