"""The files of an adapter that a run starts from: of the kind that is composed, with the shapes of the model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from launch.errors import UserError, near
from launch.planner import shapes
from launch.planner.shapes import LINEARS
from launch.rules.adapters import listed
from launch.schema import Adapter, Config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as PEFT writes them
# Key of the group adapter -> PEFT's name for it.
SAME = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
OWN = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "fan_in_fan_out")  # of PEFT's; merging knows none of them


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
            f"adapter.target_modules={listed(asked)}: the adapter of adapter.path={path} has its own layers. "
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
