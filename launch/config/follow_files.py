"""Compose with the shape of the model that a run loads, instead of that of model=<name>."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig

from launch.config.request import Request
from launch.core.errors import UserError
from launch.inputs import model_config
from launch.inputs.model_config import SHAPE, Found
from launch.inputs.model_path import file, files
from launch.schema import Config
from launch.schema.enums import Init

AUTO, DEFAULT = "auto", "tiny"
LONGEST = 60  # characters of a model's name, which is a part of the run's


def follow(request: Request, composed: DictConfig, run: dict[str, Any]) -> Request:
    """Return the request with the shape in the config.json of model.path or model.hub_id.

    The request stays the same if model=<name> has this shape, or if the shape is unknown. In the
    second case, `warnings` or launch/plan/check_files.py tell the user. `run` is the composition of
    the run that trained the model. Raises UserError if the plan would have no shape.
    """
    model, keys = composed.model, request.keys
    is_random = model.init == Init.random and "model.init" in keys
    if not composed.method.uses_model or (is_random and model.name != AUTO):
        return request
    presets = [name for name, group in files().items() if group.get("hub_id") == model.hub_id]
    if not model.path and model.hub_id and model.name not in presets and presets:
        return request.without("model").plus(f"model={presets[0]}")
    preset, revision = file(model.name), model.revision
    is_preset = model.hub_id == preset.get("hub_id") or "model.revision" in keys
    if revision and revision == preset.get("revision") and not is_preset:
        request, revision = request.plus("model.revision=null"), None  # another model's commit
    found = _found(model.path, model.hub_id, revision, is_offline(composed.user_env))
    if found is None and model.name != AUTO:
        return request
    if not isinstance(found, Found) or any(f"model.{key}" not in keys for key in found.missing):
        # Models with random weights, such as the default, say nothing about the shape of others.
        is_guess = model.path or preset.get("init") != Init.random.name
        if model.name != AUTO and is_guess:
            return request
        raise UserError(_problem(model.path, model.hub_id, found))
    for key in {*SHAPE} & {*found.shape}:
        if f"model.{key}" in keys and model[key] != found.shape[key]:
            raise UserError(
                f"model.{key}={model[key]}: {found.place} has {found.shape[key]}, and that model "
                f"is loaded. Leave out model.{key}."
            )
    pinned = [f"model.revision={found.commit}"] if found.commit and not revision else []
    if all(model.get(key) == found.shape.get(key) for key in SHAPE):
        return request.plus(*pinned) if pinned else request
    values = {"name": _name(model.path, model.hub_id, run), **found.shape}
    lines = [f"model.{k}={json.dumps(v)}" for k, v in values.items() if f"model.{k}" not in keys]
    return request.without("model").plus(f"model={AUTO}", *lines, *pinned)


def warnings(config: Config, request: Sequence[str]) -> Iterator[str]:
    """Yield a warning if the plan has the shape of other files than model=<name>, or a guess.

    Raises UserError if the shape is unknown and nothing names a model of the same shape.
    """
    model = config.model
    if config.smoke or not config.method.uses_model or model.init == Init.random and not model.path:
        return
    found = _found(model.path, model.hub_id, model.revision, is_offline(config.user_env))
    key = f"model.path={model.path}" if model.path else f"model.hub_id={model.hub_id}"
    options = [line.partition("=")[2] for line in request if line.startswith("model=")]
    if isinstance(found, str) or (found and found.missing):
        if model.name == DEFAULT and not options and not config.method.exports:
            raise UserError(_problem(model.path, model.hub_id, found))
        problem = found if isinstance(found, str) else f"it lacks {', '.join(found.missing)}"
        yield (
            f"{key}: its config.json was not used: {problem}. The plan assumes the shape of "
            f"model={model.name}."
        )
    elif found and options and options[-1] != AUTO and options[-1] != model.name:
        preset = file(options[-1])
        other = [k for k in SHAPE if preset.get(k) and preset[k] != getattr(model, k)]
        if other:
            has = ", ".join(f"{k} {getattr(model, k)}" for k in other)
            yield (
                f"model={options[-1]} takes no effect, because {found.place} has {has}. Leave out "
                f"model={options[-1]}."
            )


def _found(
    path: str | None, hub_id: str | None, revision: str | None, is_offline: bool
) -> Found | str | None:
    """Return the shape in the files, or why a Hub model's is unknown.

    None for a directory without a readable config.json, and for models of conf/model.
    """
    if path:
        return model_config.of_directory(path)
    if not hub_id or any(group.get("hub_id") == hub_id for group in files().values()):
        return None
    return model_config.of_hub(hub_id, revision, is_offline)


def is_offline(user_env: object) -> bool:
    """Return whether huggingface_hub may not use the network, here or in ranks."""
    name = "HF_HUB_OFFLINE"
    value = dict(user_env).get(name) or os.environ.get(name, "")  # type: ignore[call-overload]
    return str(value).upper() in ("1", "ON", "YES", "TRUE")


def _problem(path: str | None, hub_id: str | None, found: Found | str | None) -> str:
    """Return the message for files from which a plan cannot take the shape."""
    if not path and not hub_id:
        return "model=auto: no files. Use: model.path=<directory> or model.hub_id=<owner/name>."
    if isinstance(found, Found):
        keys = " ".join(f"model.{key}=<number>" for key in found.missing)
        return f"{found.place}: the shape of the model is incomplete. Add: {keys}."
    if path:
        why = found or "no readable config.json"
        return f"model.path={path}: {why}. Use: model.path=<a complete model>."
    return (
        f"model.hub_id={hub_id}: {found}. Or use: model.path=<directory>, or "
        "model=<a model of the same shape> with this model.hub_id."
    )


def _name(path: str | None, hub_id: str | None, run: dict[str, Any]) -> str:
    """Return a name of the model for plans and runs. A run's model has the name in its record."""
    name = str(hub_id).rpartition("/")[2]
    if path:
        name = run.get("model", {}).get("name") or model_config.directory_of(path).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(name))[:LONGEST].strip("-._") or "model"
