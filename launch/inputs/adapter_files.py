"""Check that the adapter in adapter.path matches the composition."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from launch.core.errors import UserError
from launch.inputs.reading import json_object, near_files
from launch.schema import Adapter, Config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
# Key of the group adapter -> PEFT's name for it.
NAMES = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
# PEFT's settings that prevent merging an adapter here.
UNSUPPORTED = [
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "fan_in_fan_out",
]


def check_adapter(config: Config) -> None:
    """Raise UserError if adapter.path is incomplete or contradicts the composition."""
    if config.adapter.path is None:
        return
    path = Path(config.adapter.path)
    missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if missing:
        problem = f"no {missing[0]}." if path.is_dir() else f"no such directory.{near_files(path)}"
        remedy = "adapter.path=<run>/adapter, or a directory that PEFT wrote"
        raise UserError(f"adapter.path={path}: {problem} Use: {remedy}.")
    settings = json_object(path / CONFIG)
    try:
        header(path / WEIGHTS)
    except (ValueError, struct.error) as error:
        raise UserError(f"adapter.path={path}: its {WEIGHTS} cannot be read ({error}).") from error
    adapter, source = config.adapter, f"the adapter of adapter.path={path} has"
    for key, name in NAMES.items():
        value = settings.get(name, getattr(Adapter, key))  # older PEFT does not write use_dora
        if value != getattr(adapter, key):
            remedy = f"Use: adapter.{key}={str(value).lower()}."
            raise UserError(f"adapter.{key}={getattr(adapter, key)}: {source} {value}. {remedy}")
    unsupported = [name for name in UNSUPPORTED if settings.get(name)]
    unsupported += ["bias"] if settings.get("bias", "none") != "none" else []
    if unsupported:
        name = unsupported[0]
        raise UserError(
            f"adapter.path={path}: its {CONFIG} has {name}={settings[name]}, but only LoRA with "
            "one rank and scale on linear layers can be merged here. Use: "
            "model.path=<the model merged by PEFT>."
        )
    layers, trained = adapter.target_modules, settings.get("target_modules")
    is_same = isinstance(trained, list) and set(layers) == set(trained)
    if layers != Adapter.target_modules and not is_same:
        names = f"[{','.join(layers)}]" if isinstance(layers, list) else layers
        remedy = f"Use: adapter.target_modules={Adapter.target_modules}."
        raise UserError(f"adapter.target_modules={names}: {source} other layers. {remedy}")


def header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the length of a .safetensors header, and name -> {dtype, shape, data_offsets}.

    Raises struct.error or ValueError if the file is not .safetensors.
    """
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        content: dict[str, Any] = json.loads(stream.read(min(length, 100_000_000)))
    content.pop("__metadata__", None)
    return length, content
