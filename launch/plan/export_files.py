"""Check an export's inputs: the model, the evaluation, the GGUF converter and the Hub token."""

import os
from collections.abc import Iterator
from pathlib import Path

from launch.core.errors import UserError
from launch.core.json_files import read_json
from launch.inputs.jsonl_files import check_is_file
from launch.inputs.run_models import phases_with_model
from launch.schema import Config
from launch.schema.trainer_args import value_or_none

TOKEN = "HF_TOKEN"


def check_export(config: Config) -> None:
    """Raise UserError if an export's converter, evaluation or Hub token is missing or wrong."""
    if not config.method.exports:
        return
    converter, evaluation, target = (
        value_or_none(config, name) for name in ("gguf_converter", "results_from", "push_to")
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


def warnings(config: Config) -> Iterator[str]:
    """Yield a warning if an export would keep weights in 32 bits, as full training leaves them."""
    if not config.method.exports or not config.model.path or value_or_none(config, "weights"):
        return
    content = read_json(Path(config.model.path) / "config.json") or {}
    size = 4 * config.model.num_parameters / 1e9
    if "float32" in (content.get("dtype"), content.get("torch_dtype")) and size >= 1:
        yield (
            f"method.args.weights=null keeps the fp32 weights of the training, {size:.0f} GB. Use: "
            "method.args.weights=bf16 for half of that."
        )


def _check_evaluation(config: Config, run: Path) -> None:
    """Raise UserError unless `run` is a finished evaluation of the model to export.

    Otherwise the model card would show the results of another model.
    """
    result, record = read_json(run / "result.json") or {}, read_json(run / "record.json") or {}
    model = (record.get("composition") or {}).get("model")
    measures = "interval" in result or "lm_eval" in result  # training has no interval
    if result.get("status") != "done" or not measures or not isinstance(model, dict):
        raise UserError(
            f"method.args.results_from={run}: not a finished evaluation. Use: "
            "method.args.results_from=<run directory of method=evaluate>."
        )
    # An adapter's run also saves the merged model, which is the one that an evaluation measures.
    adapter = config.adapter.path
    path = str(Path(adapter).resolve().with_name("model")) if adapter else config.model.path
    evaluated = _identity(model.get("path"), model.get("hub_id"), model.get("revision"))
    exported = _identity(path, config.model.hub_id, config.model.revision)
    if evaluated != exported:
        remedy = f"an evaluation of {exported}"
        if not path and model.get("hub_id") == config.model.hub_id:
            remedy = f"model.revision={model.get('revision')}"
        raise UserError(
            f"method.args.results_from={run}: this run evaluated {evaluated}, but the export is of "
            f"{exported}. Use: {remedy}."
        )


def _identity(path: str | None, hub_id: str | None, revision: str | None) -> str:
    """Return text that is equal for equal models: the real path, or the Hub id and revision."""
    if path:
        return str(Path(path).resolve())
    return f"{hub_id} at {revision or 'its newest commit'}" if hub_id else "random weights"


def check_not_a_run(path: Path) -> None:
    """Raise UserError if model.path has an adapter, or belongs to a run that has no model.

    The message offers the models of the run's phases and its newest checkpoint.
    """
    if (path / "adapter_config.json").is_file():
        adapter = f"model.path=<its base model> adapter=<its kind> adapter.path={path}"
        weights = {file.name for file in path.glob("*.safetensors")} - {"adapter_model.safetensors"}
        if weights and (path / "config.json").is_file():
            raise UserError(
                f"model.path={path} also has an adapter, which transformers would load into the "
                f"model. Use: {adapter}, or move adapter_config.json out of this directory."
            )
        raise UserError(
            f"model.path={path} is an adapter, not a model. Use: {adapter}, or model.path=<its "
            "run>, which has the merged model."
        )
    run, record = path.parent, read_json(path.parent / "record.json")
    if path.name != "model" or path.is_dir() or record is None:
        return
    models = phases_with_model(run, record)
    # Complete checkpoints that have a model's files, by step.
    checkpoints = {
        int(folder.name.rpartition("-")[2]): folder
        for folder in run.glob("checkpoints/checkpoint-*[0-9]")
        if (folder / "manifest.json").is_file() and (folder / "config.json").is_file()
    }
    if checkpoints:
        models.append(checkpoints[max(checkpoints)])
    remedies = [f"model.path={model}" for model in models]
    if record.get("status") != "done" and not ("phases" in record and remedies):
        remedies.insert(0, "the command of that run again, to finish it")
    raise UserError(
        f"model.path={run}: that run has no model (status {record.get('status')}). Use: "
        f"{' or '.join(remedies) or 'model.path=<the run that trained the model>'}."
    )
