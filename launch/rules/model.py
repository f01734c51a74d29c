"""Reject models that the plan does not describe: another shape, commit or length than is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launch.inputs.model_path import SHAPE, file, files
from launch.rules.refusal import Refusal
from launch.schema import Adapter, Config, shapes
from launch.schema.enums import Init
from launch.schema.trainer_args import argument

KEYS = [key for key in SHAPE if key not in ("architecture", "max_positions")]
KEYS += ["head_dim", "tied_embeddings", "attention_bias", "num_parameters"]
# The shapes in conf/model count exactly. A published count may be rounded, or include what a model
# adds to the layers. But one layer of 80 more or less, 1.2% of a model, must not pass.
TOLERANCE = 0.01
COMMIT = re.compile(r"[0-9a-f]{40}")


def model_faults(c: Config) -> Iterator[Refusal]:
    model, layers = c.model, c.adapter.target_modules
    # PEFT reads one name as a regular expression. The schema has the names.
    every = Adapter.target_modules
    if layers != every and (not isinstance(layers, list) or not layers or every in layers):
        yield Refusal(
            "adapter_layers",
            f"adapter.target_modules={layers}: it takes all-linear, or a list of linear layers",
            "adapter.target_modules=[q_proj,v_proj]",
        )
    if c.method.uses_model and model.init == Init.pretrained and (model.path or model.hub_id):
        yield from _shape_faults(c)
        if not model.path:
            yield from _hub_faults(c)


def _shape_faults(c: Config) -> Iterator[Refusal]:
    """Reject a count of parameters that the shape does not have."""
    model, count = c.model, shapes.parameters(c.model)
    if abs(count - model.num_parameters) <= TOLERANCE * model.num_parameters:
        return
    own = {"attention_bias": False, **file(model.name)}
    changed = [key for key in KEYS if key in own and getattr(model, key) != own[key]]
    overrides = " ".join(f"model.{key}={getattr(model, key)}" for key in changed)
    number = f"model.num_parameters={count}"
    remedies = [f"no {', no '.join(f'model.{key}' for key in changed)}"] if changed else []
    if changed != ["num_parameters"]:
        path = "model.path=null " if model.path else ""
        remedies.append(f"model.init=random {path}{number} for random weights of this shape")
    if model.path:
        remedies.append(f"{number} if the model of that directory has it")
    yield Refusal(
        "model_shape",
        f"{overrides or f'model={model.name}'}: the shape counts {count} parameters, "
        f"model.num_parameters is {model.num_parameters}, and {model.path or model.hub_id} is "
        "loaded with its own shape",
        "; or ".join(remedies),
    )


def _hub_faults(c: Config) -> Iterator[Refusal]:
    """Reject a hub model without a commit, or with the commit or the shape of another."""
    model, own = c.model, file(c.model.name)
    is_own = own.get("hub_id") == model.hub_id
    others = [name for name, group in files().items() if group.get("hub_id") == model.hub_id]
    described = "" if is_own or not others else f"model={others[0]}, which has both; or "
    why = ""
    if model.revision is None:
        why = "model.revision is missing: which of its commits"
    elif own and not is_own and model.revision == own.get("revision"):
        why = f"model.revision={model.revision[:12]} is a commit of {own['hub_id']}"
    elif own and described:
        why = f"memory and speed would be those of model={model.name}"
    if why:
        remedy = (
            f"{described}model=<of the same shape> model.hub_id={model.hub_id} "
            "model.revision=<its commit, 40 hexadecimal digits>"
        )
        remedy = "no model.revision: the model's file has its commit" if is_own else remedy
        yield Refusal("model_hub_id", f"model.hub_id={model.hub_id}: {why}", remedy)
        return
    # Answers are kept by the revision.
    is_kept = argument(c, "engine") is not None or c.method.has_cycles
    if is_kept and not COMMIT.fullmatch(model.revision or ""):
        message = (
            f"model.revision={model.revision} may move, but cached answers are identified by it"
        )
        remedy = "model.revision=<a commit, 40 hexadecimal digits>, or model.path=<directory>"
        yield Refusal("evaluated_revision", message, remedy)
