"""Evaluate the model of a run, or its base, on the held-out rows and by the rewards of that run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.config.request import Request
from launch.config.row_reward import judging
from launch.core.errors import UserError
from launch.core.json_files import read_json
from launch.inputs.model_config import directory_of
from launch.inputs.model_path import file
from launch.schema import Choice, Config, Model
from launch.schema.data import Data

# The keys of data that held-out rows depend on. Others, such as data.limit, are for training.
HELDOUT_KEYS = (
    *("name", "kind", "tasks", "num_train", "num_heldout", "seed", "path", "heldout_path"),
    *("hub_id", "revision", "subset", "split", "heldout_split", "sources", "columns"),
    *("answer_pattern", "system_prompt", "filter", "heldout_fraction", "chat_template"),
)
LENGTH, BASE = "method.args.max_new_tokens", "model.base_of"
REASON = "as in training"


def source(composed: DictConfig | Config) -> dict[str, Any]:
    """Return the composition of the run that trained a model; {} if no run did."""
    path = composed.model.base_of or composed.model.path
    return _composition(directory_of(path)) if path else {}


def _composition(model: Path) -> dict[str, Any]:
    """Return the composition of the run of a model or checkpoint. An export has its source's."""
    records = (read_json(folder / "record.json") for folder in model.parents[:2])
    record = next(filter(None, records), {})
    recorded: dict[str, Any] = record.get("composition") or {}
    source = (recorded.get("model") or {}).get("path")
    is_export = (recorded.get("method") or {}).get("kind") == "exporter"
    return _composition(Path(source)) if is_export and source else recorded


def with_base(request: Request, run: dict[str, Any], path: str) -> Request:
    """Return the request with the model that a run started from, instead of model.base_of.

    Raises UserError if that model is unknown, or if the request names a model itself.
    """
    model, adapter = run.get("model") or {}, (run.get("adapter") or {}).get("path")
    places = [key for key in ("model.path", "model.hub_id") if key in request.keys]
    problem = ""
    if not model:
        what = "not a run that trained a model" if Path(path).exists() else "no such run"
        problem = f"{what}. Use: {BASE}=<run>, or before training model= and data="
    elif places:
        problem = f"names the model already. Remove {places[0]}"
    elif adapter:  # the run that left the adapter has also merged it
        problem = f"that run continued an adapter. Use: model.path={Path(adapter).parent}"
    if problem:
        raise UserError(f"{BASE}={path}: {problem}.")
    names = {field.name for field in dataclasses.fields(Model)} - {"base_of"}
    values = {key: value for key, value in model.items() if key in names}
    lines = [
        f"model.{k}={json.dumps(v)}" for k, v in values.items() if f"model.{k}" not in request.keys
    ]
    preset = model["name"] if file(model["name"]) else "auto"
    return request.without("model").without(BASE).plus(f"model={preset}", *lines)


def follow(config: Config, request: Request, run: dict[str, Any]) -> None:
    """Set data, rewards and length of an evaluation to those of the run that trained its model.

    Keys of the command stay. With data=, only the length of answers is taken from the run. With
    experiment=, nothing is. For a run that trained on samples, follow the run that sampled them.
    Raises UserError if the run has no held-out rows.
    """
    typed = {str(override.key_or_group) for override in request.parsed}
    if not config.method.measures_model or "experiment" in typed:
        return
    data = None if "data" in typed else _data(run.get("data"), config.data, request)
    if data and data.path and not data.has_heldout:
        sampled = read_json(Path(data.path).with_name("record.json")) or {}
        if sampled.get("composition"):  # the run trained on its samples, as RAFT's phases do
            return follow(config, request, sampled["composition"])
    method = run.get("method") or {}
    args = method.get("args") or {}
    longest = args.get("max_completion_length") or args.get("max_new_tokens")
    if longest and LENGTH not in request.keys:
        config.method.args["max_new_tokens"] = longest
        add(config, LENGTH, longest)
    if data is None:
        return
    if not data.has_heldout:
        if config.method.args.get("lm_eval_tasks"):
            return
        model = BASE if BASE in request.keys else "model.path"
        raise UserError(
            f"method={config.method.name}: the run of {model} (data={data.name}) has no held-out "
            "rows. Use: data=jsonl data.heldout_path=<rows with prompt and answer>, or other data "
            "with answers; for chats, measure the loss of held-out rows while "
            "training (docs/methods/evaluate.md)."
        )
    config.data = data
    add(config, "data", data.name)
    if any(key.startswith("method.reward") for key in typed):
        return
    rewards = {name: w for name, w in (method.get("rewards") or {}).items() if w > 0}
    # Others, such as brevity, would count correct answers as wrong. Without a judging reward, the
    # evaluation measures the mean of all.
    rewards = config.method.rewards = judging(rewards) or rewards
    config.method.reward_chain = [x for x in method.get("reward_chain") or [] if x in rewards]
    config.method.reward_pattern = method.get("reward_pattern")
    if rewards:
        add(config, "method.rewards", rewards)


def add(config: Config, key: str, value: object) -> None:
    """List a value in `followed`, for the plan."""
    config.followed.append(Choice(key, value, REASON))


def _data(recorded: dict[str, Any] | None, composed: Data, request: Request) -> Data | None:
    """Return the run's data with the keys of the command; None if the record has none to read."""
    if not recorded:
        return None
    values = {key: recorded[key] for key in HELDOUT_KEYS if key in recorded}
    typed = [key.partition(".")[2] for key in request.keys if key.startswith("data.")]
    try:
        data = OmegaConf.merge(OmegaConf.structured(Data), values)
        for key in typed:
            OmegaConf.update(data, key, OmegaConf.select(OmegaConf.structured(composed), key))
        followed: Any = OmegaConf.to_object(data)
    except OmegaConfBaseException:  # a record of another version
        return None
    return followed
