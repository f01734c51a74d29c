"""Check that `model.path` is complete, and that it holds the model that the plan assumes."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.core.errors import UserError
from launch.core.json_files import read_json, yaml_file
from launch.inputs.adapter_files import header
from launch.inputs.reading import json_object
from launch.schema import Config

MODELS = Path(__file__).parents[2] / "conf/model"

# Key of model -> transformers' name in config.json
SHAPE = {
    "architecture": "model_type",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
# Each file is a complete tokenizer or a vocabulary for one. Without any, transformers silently
# makes an empty tokenizer.
TOKENIZERS = [
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
]
INDEX = "model.safetensors.index.json"


def check(path: Path) -> None:
    """Raise UserError for a damaged config.json, no tokenizer, or missing or truncated weights."""
    for where, fault in _faults(path):
        raise UserError(f"{where}: {fault}")


def _faults(path: Path) -> Iterator[tuple[str, str]]:
    json_object(path / "config.json")
    if not any(file for pattern in TOKENIZERS for file in path.glob(pattern)):
        yield (
            f"model.path={path}",
            "no tokenizer; a model directory has config.json, *.safetensors and tokenizer.json "
            f"(or {', '.join(TOKENIZERS[1:-1])}). Copy it from the source of the weights: "
            "AutoTokenizer's save_pretrained writes it.",
        )
    for file in _weights(path):
        whole = _whole_size(file) if file.is_file() else None
        if not file.is_file():
            source = INDEX if (path / INDEX).is_file() else "a link"
            yield str(file), f"missing, although {source} names it. Copy or download it."
        elif (size := file.stat().st_size) != whole:
            reason = f"its header says {whole:,}" if whole else "it has no safetensors header"
            yield str(file), f"damaged: {size:,} bytes, and {reason}. Copy or download it again."


def _weights(path: Path) -> list[Path]:
    """Return the files that transformers loads: those of the index, model.safetensors, or all."""
    if (path / INDEX).is_file():
        names = json_object(path / INDEX).get("weight_map")
        if isinstance(names, dict):
            return [path / name for name in sorted(set(map(str, names.values())))]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    return sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))


def _whole_size(file: Path) -> int | None:
    """Return a file's size in bytes according to its header; None without a header."""
    try:
        length, tensors = header(file)
        ends = (tensor["data_offsets"][1] for tensor in tensors.values())
        return 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error):
        return None


def warnings(config: Config) -> list[str]:
    """Warn if the plan assumes another model than that in model.path.

    Do not warn about an unreadable config.json, which a run rejects, or under smoke=true, where
    earlier phases made the model small.
    """
    folder = Path(config.model.path or ".")
    content = read_json(folder / "config.json") if config.model.path and not config.smoke else None
    own = {key: content[name] for key, name in SHAPE.items() if name in content} if content else {}
    other = {key: value for key, value in own.items() if value != getattr(config.model, key)}
    if not other:
        return []
    like = [
        f"model={name}"
        for name, group in files().items()
        if all(group.get(key) == value for key, value in own.items())
    ]
    has = ", ".join(f"{key} {value}" for key, value in other.items())
    goes_by = ", ".join(str(getattr(config.model, key)) for key in other)
    remedy = " or ".join(like) or "the model= next to it, with its own model.num_layers and so on"
    return [
        f"model.path={config.model.path}: {has} by its config.json, but the plan and the defaults "
        f"of method.args use model={config.model.name}: {goes_by}. Use: {remedy}."
    ]


@functools.cache
def file(name: str) -> dict[str, Any]:
    """Return the content of a model's file; {} for a model outside conf/."""
    path = MODELS / f"{name}.yaml"
    content: dict[str, Any] = yaml_file(path) if path.is_file() else {}
    return content


def files() -> dict[str, dict[str, Any]]:
    """Return the files of conf/model by name. Read only if needed for a comparison."""
    return {path.stem: file(path.stem) for path in sorted(MODELS.glob("*.yaml"))}
