"""Rules about adapters and precisions, and what must be true of the files of an adapter that a run starts from."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from launch.errors import UserError, near
from launch.planner import shapes
from launch.planner.shapes import LINEARS
from launch.rules.rule import Rule
from launch.schema import Adapter, Config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as PEFT writes them
# Key of the group adapter -> PEFT's name for it.
SAME = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
OWN = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "fan_in_fan_out")  # of PEFT's; merging knows none of them


def _adapter_keys(config: Config) -> list[str]:
    """Keys of an adapter that were given a value although there is none."""
    keys = ("alpha", "dropout", "target_modules", "rslora", "dora", "path")
    return [key for key in keys if config.adapter.name == "none" and getattr(config.adapter, key) != getattr(Adapter, key)]


def _no_layers(config: Config) -> bool:
    given = config.adapter.target_modules
    return given != Adapter.target_modules and not (isinstance(given, list) and given and set(map(str, given)) <= set(LINEARS))


def _layers_refused(config: Config) -> str:
    """PEFT would read a name by itself as a regular expression, and a list of other names would leave layers out without a word."""
    given = config.adapter.target_modules
    what = f"adapter.target_modules={_listed(given)}"
    if not given or not isinstance(given, (str, list)):
        return f"{what}: it names no linear layer"
    unknown = [name for name in _names(given) if name not in LINEARS]
    if unknown:
        return f"{what}: no linear layer is named {unknown[0]}.{near(unknown[0], (*LINEARS, Adapter.target_modules))}"
    return f"{what}: it takes a list"


def _layers_to_give(config: Config) -> str:
    names = [name for name in _names(config.adapter.target_modules) if name in LINEARS]
    some = f"adapter.target_modules=[{','.join(names or ('q_proj', 'v_proj'))}]"
    return f"{some}, of {', '.join(LINEARS)}; or adapter.target_modules={Adapter.target_modules}"


def _names(given: object) -> list[str]:
    """Those that a value means: a list, or names with commas between."""
    return [str(one).strip() for one in (given if isinstance(given, list) else str(given).split(","))]


def _listed(given: object) -> str:
    return f"[{','.join(map(str, given))}]" if isinstance(given, list) else str(given)


def _nf4(config: Config) -> bool:
    return config.precision.weights == "nf4" and config.method.kind == "trainer"


ADAPTER_RULES = [
    Rule(
        "adapter_keys",
        lambda c: bool(_adapter_keys(c)),
        lambda c: f"adapter.{_adapter_keys(c)[0]} under adapter=none: it would be ignored",
        lambda c: "adapter=lora",
    ),
    Rule(
        "adapter_dropout",
        lambda c: not 0 <= c.adapter.dropout < 1,
        lambda c: f"adapter.dropout={c.adapter.dropout:g}: it is the share of an adapter's input that is dropped",
        lambda c: "0 up to, but not, 1",
    ),
    Rule("adapter_layers", _no_layers, _layers_refused, _layers_to_give),
    Rule(
        "nf4_sharded",
        lambda c: _nf4(c) and c.topology.strategy in ("fsdp", "zero3"),
        lambda c: (
            f"precision=nf4 with topology.strategy={c.topology.strategy}: "
            + (
                "accelerate leaves 4-bit weights whole on every rank, so nothing would be sharded"
                if c.topology.strategy == "fsdp"
                else "ZeRO-3 cuts weights apart, and 4-bit ones are unpacked by scales that it does not cut with them"
            )
        ),
        lambda c: "topology=ddp, a quarter of bf16's memory on each GPU; or precision=bf16 adapter=lora, which is sharded",
    ),
    Rule(
        "nf4_colocate",
        lambda c: _nf4(c) and c.topology.name == "colocate",
        lambda c: "precision=nf4 with topology=colocate: TRL has vLLM quantize its own copy, which takes no merged weights afterwards",
        lambda c: "topology=split, whose server is sent them in 16 bits; or topology=single, where transformers generates",
    ),
    Rule(
        "fp8_zero3",
        lambda c: c.precision.compute == "fp8" and c.topology.strategy == "zero3" and c.method.kind == "trainer",
        lambda c: "precision=fp8 with ZeRO-3: an fp8 product keeps a view of its gathered weight for backward, so nothing would be freed",
        lambda c: "topology=fsdp, which shards what computes in fp8 too",
    ),
    Rule(
        "fp16_weights",
        lambda c: (
            c.precision.compute == c.precision.weights == "fp16"
            and c.topology.strategy in ("none", "ddp")
            and c.adapter.rank is None
            and c.method.kind == "trainer"
        ),
        lambda c: "precision.weights=fp16 with adapter=none: gradients would be fp16, and torch.amp's scaler refuses to unscale such",
        lambda c: "precision.weights=fp32; or an adapter, whose own weights are fp32",
    ),
    Rule(
        "loss_scaling",
        lambda c: c.precision.loss_scaling != (c.precision.compute == "fp16"),
        lambda c: (
            f"precision.loss_scaling={str(c.precision.loss_scaling).lower()} with products in {c.precision.compute}: "
            "torch.amp scales the loss of fp16, always, and of nothing else"
        ),
        lambda c: f"precision.loss_scaling={str(c.precision.compute == 'fp16').lower()}",
    ),
]


def check_adapter(config: Config) -> None:
    """The directory of adapter.path: an adapter, of the kind that is composed, with the shapes of the model. Raises UserError."""
    if config.adapter.path is None:
        return
    path = Path(config.adapter.path)
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"adapter.path={path}: no such directory.{near(path.name, siblings)}")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise UserError(f"adapter.path={path}: no {name}. Use: the adapter/ of a run, or a directory that PEFT wrote.")
    try:
        given = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        _, tensors = header(path / WEIGHTS)
        if not isinstance(given, dict):
            raise ValueError(f"{CONFIG} holds no JSON object")
    except (ValueError, struct.error) as error:
        raise UserError(f"adapter.path={path}: its {CONFIG} or {WEIGHTS} cannot be read ({error}).") from error
    for key, name in SAME.items():
        found = given.get(name, getattr(Adapter, key))  # PEFT wrote no use_dora before it had DoRA
        if found != getattr(config.adapter, key):
            asked = f"adapter.{key}={getattr(config.adapter, key)}"
            raise UserError(f"{asked}: the adapter of adapter.path={path} has {found}. Use: adapter.{key}={str(found).lower()}.")
    foreign = [name for name in OWN if given.get(name)] + ["bias"] * (given.get("bias", "none") != "none")
    if foreign:
        raise UserError(
            f"adapter.path={path}: its {CONFIG} has {foreign[0]}={given[foreign[0]]}, and only LoRA of one rank and scale on linear "
            "layers is merged here. Merge it with PEFT, and give the result as model.path."
        )
    asked, has = config.adapter.target_modules, given.get("target_modules")
    if asked != Adapter.target_modules and not (isinstance(has, list) and set(asked) == set(has)):
        raise UserError(
            f"adapter.target_modules={_listed(asked)}: the adapter of adapter.path={path} has its own layers. "
            "Use: no adapter.target_modules."
        )
    if config.model.path is None:  # of a directory the rank sees the real shapes
        _check_shapes(config, path, tensors)


def _check_shapes(config: Config, path: Path, tensors: dict[str, Any]) -> None:
    """A LoRA matrix A has the inputs of its layer, B its outputs."""
    sizes = dict(zip(LINEARS, shapes.linear_sizes(config.model), strict=True))
    for name, entry in tensors.items():
        parts = name.split(".")
        layer = next((int(part) for part in parts if part.isdigit()), 0)
        linear = next((part for part in parts if part in sizes), None)
        if linear is None or parts[-2] not in ("lora_A", "lora_B"):
            continue
        inputs, outputs = sizes[linear]
        found, wanted = (entry["shape"][1], inputs) if parts[-2] == "lora_A" else (entry["shape"][0], outputs)
        if found != wanted or layer >= config.model.num_layers:
            what = f"has {wanted} there" if found != wanted else f"has {config.model.num_layers} layers"
            raise UserError(
                f"adapter.path={path} belongs to another base: its {name} is of size {found}, and model={config.model.name} {what}. "
                "Use: the model it was trained on."
            )


def header(file: Path) -> tuple[int, dict[str, Any]]:
    """Of a .safetensors file, of which only this is read: the header's length in bytes, and name -> {dtype, shape, data_offsets}.

    Raises struct.error or ValueError for another file.
    """
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        content: dict[str, Any] = json.loads(opened.read(min(length, 100_000_000)))
    content.pop("__metadata__", None)
    return length, content
