"""Define rules about the model: which weights are loaded, and that the plan describes them."""

from __future__ import annotations

import functools
from typing import Any

import yaml

from launch.inputs.model_path import MODELS, files
from launch.rules.rule import Rule
from launch.rules.topology import longest
from launch.schema import Config, shapes
from launch.schema.enums import Init

SHAPE = (
    *(
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
    ),
    *("tied_embeddings", "attention_bias", "num_parameters"),
)
# The shapes in conf/model count exactly. A published count may be rounded, or include what a model
# adds to the layers. But one layer of 80 more or less, 1.2% of a model, must not pass.
TOLERANCE = 0.01


@functools.cache
def _file(name: str) -> dict[str, Any]:
    """Return the content of a model's file; {} for a model outside conf/."""
    file = MODELS / f"{name}.yaml"
    content: dict[str, Any] = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return content


def _loads(config: Config) -> bool:
    return (
        config.method.uses_model
        and config.model.init == Init.pretrained
        and bool(config.model.path or config.model.hub_id)
    )


def _another_shape(config: Config) -> bool:
    model = config.model
    return (
        _loads(config)
        and abs(shapes.parameters(model) - model.num_parameters) > TOLERANCE * model.num_parameters
    )


def _changed(config: Config) -> list[str]:
    """Return keys of the shape that differ from the model's file."""
    own = {"attention_bias": False, **_file(config.model.name)}
    return [
        f"model.{key}={getattr(config.model, key)}"
        for key in SHAPE
        if key in own and getattr(config.model, key) != own[key]
    ]


def _shape_that_would_do(config: Config) -> str:
    keys, count = (
        [key.partition("=")[0] for key in _changed(config)],
        f"model.num_parameters={shapes.parameters(config.model)}",
    )
    found = [f"no {', no '.join(keys)}"] if keys else []
    if keys != ["model.num_parameters"]:
        found.append(
            f"model.init=random {'model.path=null ' if config.model.path else ''}{count} for "
            "random weights of this shape"
        )
    if config.model.path:
        found.append(f"{count} where the model of that directory has it")
    return "; or ".join(found)


def _described(config: Config) -> str:
    """Return the name of another model whose file names this hub repository."""
    others = [
        name
        for name, content in files().items()
        if content.get("hub_id") == config.model.hub_id and name != config.model.name
    ]
    return next(iter(others), "")


def _from_the_hub(config: Config) -> bool:
    return _loads(config) and config.model.path is None


def _another_hub_id(config: Config) -> bool:
    """Return whether model.hub_id replaces the file's while its revision or shape stays.

    A model outside conf/ is accepted as it is.
    """
    model, own = config.model, _file(config.model.name)
    if (
        not _from_the_hub(config)
        or model.revision is None
        or not own
        or own.get("hub_id") == model.hub_id
    ):
        return False
    return model.revision == own.get("revision") or bool(_described(config))


def _why_another(config: Config) -> str:
    own = _file(config.model.name)
    if config.model.revision == own.get("revision"):
        return f"model.revision={str(config.model.revision)[:12]} is a commit of {own['hub_id']}"
    return f"memory and speed would be those of {own.get('hub_id') or config.model.name}"


def _with_revision(config: Config) -> str:
    if _file(config.model.name).get("hub_id") == config.model.hub_id:
        return "no model.revision: the model's file has its commit"
    described = _described(config)
    own = f"model={described}, which has its commit and shape; or " if described else ""
    return (
        f"{own}model=<of the same shape> model.hub_id={config.model.hub_id} "
        "model.revision=<its commit, 40 hexadecimal digits>"
    )


def _length_argument(config: Config) -> str:
    names = "sequence" if config.method.measures_machine else "max_length or max_completion_length"
    return f"method.args.{names}"


MODEL_RULES = [
    Rule(
        "sequence_length",
        lambda c: c.method.uses_model and longest(c) > c.model.max_positions,
        lambda c: f"{c.model.name} has {c.model.max_positions} positions, not {longest(c)}",
        lambda c: f"{_length_argument(c)} of at most {c.model.max_positions}, or another model=",
    ),
    Rule(
        "model_source",
        lambda c: c.model.init == Init.pretrained and not c.model.path and not c.model.hub_id,
        lambda c: f"model={c.model.name} with init=pretrained: no weights are named",
        "model.path=<directory>, model.hub_id=<owner/name>, or model.init=random",
    ),
    Rule(
        "model_shape",
        _another_shape,
        lambda c: (
            f"{' '.join(_changed(c)) or f'model={c.model.name}'}: the shape counts "
            f"{shapes.parameters(c.model)} parameters, "
            f"model.num_parameters is {c.model.num_parameters}, and "
            f"{c.model.path or c.model.hub_id} is loaded as it is"
        ),
        _shape_that_would_do,
    ),
    Rule(
        "model_revision",
        lambda c: _from_the_hub(c) and c.model.revision is None,
        lambda c: f"model.hub_id={c.model.hub_id} without model.revision: which of its commits",
        _with_revision,
    ),
    Rule(
        "model_hub_id",
        _another_hub_id,
        lambda c: f"model.hub_id={c.model.hub_id} with model={c.model.name}: {_why_another(c)}",
        _with_revision,
    ),
]
