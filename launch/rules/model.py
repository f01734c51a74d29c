"""Reject a model whose shape or commit is not the one that a run would load."""

from __future__ import annotations

from collections.abc import Iterator

from launch.inputs.model_config import COMMIT, MXFP4, SHAPE, quantization_of
from launch.inputs.model_path import file
from launch.rules.refusal import Refusal
from launch.schema import LINEARS, Adapter, Config, Model, shapes
from launch.schema.enums import Init
from launch.schema.trainer_args import value_or_none

KEYS = [*SHAPE[1:], "num_parameters"]
# The counts in conf/model are exact. A published count may be rounded or include other parameters.
# A difference of one layer in 80, which is 1.2% of a model, must not pass.
TOLERANCE = 0.01
TRAINABLE = (MXFP4, "bitsandbytes")  # experts are dequantized; PEFT trains adapters on nf4


def model_problems(c: Config) -> Iterator[Refusal]:
    model, layers = c.model, c.adapter.target_modules
    # PEFT reads a string as a regular expression. The schema checks the names in a list.
    all_linear, attention = Adapter.target_modules, LINEARS[:4]
    key, problem, allowed = "adapter.target_modules", "", "q_proj,v_proj"
    if layers != all_linear and (
        not isinstance(layers, list) or not layers or all_linear in layers
    ):
        problem = "neither all-linear nor a list of linear layers"
    elif model.num_experts and layers != all_linear and {*layers} - {*attention}:
        problem, allowed = f"the experts of {model.name} take no adapter", ",".join(attention)
    if problem:
        yield Refusal("adapter_layers", f"{key}={layers}: {problem}", f"{key}=[{allowed}]")
    if c.method.uses_model and model.init == Init.pretrained and (model.path or model.hub_id):
        yield from _shape_problems(c)
        yield from _quantization_problems(c)
        if not model.path:
            yield from _hub_problems(c)


def is_count_of_shape(model: Model) -> bool:
    """Return whether model.num_parameters is the count of the shape, except for rounding."""
    difference = abs(shapes.parameters(model) - model.num_parameters)
    return difference <= TOLERANCE * model.num_parameters


def _shape_problems(c: Config) -> Iterator[Refusal]:
    """Reject a parameter count that does not match the shape."""
    model, count = c.model, shapes.parameters(c.model)
    if not shapes.is_known(model) or is_count_of_shape(model):
        return
    preset = {"attention_bias": False, "num_experts": 0, **file(model.name)}
    changed = [key for key in KEYS if key in preset and getattr(model, key) != preset[key]]
    overrides = " ".join(f"model.{key}={getattr(model, key)}" for key in changed)
    number = f"model.num_parameters={count}"
    remedies = [f"leave out {', '.join(f'model.{key}' for key in changed)}"] if changed else []
    if changed != ["num_parameters"]:
        path = "model.path=null " if model.path else ""
        remedies.append(f"model.init=random {path}{number} for random weights of this shape")
    if model.path:
        remedies.append(f"{number} if the model in that directory has as many")
    yield Refusal(
        "model_shape",
        f"{overrides or f'model={model.name}'}: this shape has {count} parameters, "
        f"but model.num_parameters is {model.num_parameters}, and {model.path or model.hub_id} is "
        "loaded with the shape in its config.json",
        "; or ".join(remedies),
    )


def _quantization_problems(c: Config) -> Iterator[Refusal]:
    """Reject training of weights that have no gradient, and their transfer to packed ones."""
    model, method = c.model, quantization_of(c.model)
    source = f"model.path={model.path}" if model.path else f"model.hub_id={model.hub_id}"
    if not c.method.trains or method is None:
        return
    if method not in TRAINABLE:
        yield Refusal(
            "quantized_model",
            f"{source}: its weights are quantized ({method}), so they cannot be trained",
            "model.path=<the original model>; or adapter=qlora with it, to save memory",
        )
    elif method == MXFP4 and (c.topology.servers or c.topology.name == "colocate"):
        yield Refusal(
            "quantized_model",
            f"{source}: the server would keep the experts in {method}, but training sends them in "
            "16 bits",
            "topology=ddp or topology=fsdp, which generate with transformers; or model.path=<a run "
            "of method=sft>, which has them in 16 bits",
        )


def _hub_problems(c: Config) -> Iterator[Refusal]:
    """Reject another model's commit, and a branch for cached answers."""
    model, preset = c.model, file(c.model.name)
    is_preset = preset.get("hub_id") == model.hub_id
    if model.revision is None:  # launch/plan/planning.py resolves it
        return
    if not is_preset and model.revision == preset.get("revision"):
        yield Refusal(
            "model_hub_id",
            f"model.hub_id={model.hub_id}: model.revision={model.revision[:12]} is a commit of "
            f"{preset['hub_id']}",
            f"model.hub_id={model.hub_id} model.revision=<its commit, or null for the newest>",
        )
        return
    # Cached answers are identified by the revision.
    is_cached = value_or_none(c, "engine") is not None or c.method.has_cycles
    if is_cached and not COMMIT.fullmatch(model.revision):
        message = (
            f"model.revision={model.revision} may move, but cached answers are identified by it"
        )
        remedy = "model.revision=<a commit, 40 hexadecimal digits>, or model.path=<directory>"
        yield Refusal("evaluated_revision", message, remedy)
