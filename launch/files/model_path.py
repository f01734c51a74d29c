"""What stands in `model.path`: whether it is whole, and whether it is the model that the plan goes by."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.files.adapter_files import header
from launch.rules import model as model_rules
from launch.schema import Config

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
# Each is a tokenizer by itself, or a vocabulary that one can be made of. Of none transformers makes an empty one, without a word.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "*.tiktoken")
POSITIVE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")  # what no model that has it has none of

INDEX = "model.safetensors.index.json"


def check(path: Path) -> None:
    """Raises UserError for a directory without a tokenizer, and for weights that a copy has left out or cut off."""
    if not any(file for pattern in TOKENIZERS for file in path.glob(pattern)):
        raise UserError(
            f"model.path={path}: no tokenizer; a model directory holds config.json, *.safetensors and tokenizer.json (or "
            f"{', '.join(TOKENIZERS[1:-1])}). Copy it from where the weights are from: AutoTokenizer's save_pretrained writes it."
        )
    for file in _weights(path):
        if not file.is_file():
            raise UserError(f"{file}: no such file, and {INDEX if (path / INDEX).is_file() else 'a link'} names it. Copy or download it.")
        size, whole = file.stat().st_size, _whole_size(file)
        if size != whole:
            said = f"its header says {whole:,}" if whole else "it does not begin as a safetensors file"
            raise UserError(f"{file}: damaged: {size:,} bytes, and {said}. Copy or download it again.")


def check_config(path: Path) -> None:
    """Raises UserError for a config.json that is no JSON object, that names no kind of model, or whose sizes are those of none."""
    file, again = path / "config.json", "Copy or download it again"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise UserError(f"{file}: damaged: {said}. {again}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: a JSON {type(found).__name__}, and an object is needed. {again}.")
    if not isinstance(found.get("model_type"), str):
        raise UserError(f"{file}: no model_type, by which transformers knows what to load. {again}: save_pretrained writes it.")
    for name in POSITIVE:
        size = found.get(name)
        if size is not None and not (isinstance(size, int) and size > 0):
            raise UserError(f"{file}: {name} is {json.dumps(size)}, and it must be a whole number above 0. {again}.")


def _weights(path: Path) -> list[Path]:
    """The files that transformers loads: those of the index, or the one, or all that some other program wrote."""
    if (path / INDEX).is_file():
        try:
            return [path / name for name in sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path / INDEX}: damaged: it names no files of weights. Copy or download it again.") from error
    one = path / "model.safetensors"
    return [one] if one.is_file() else sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))


def _whole_size(file: Path) -> int | None:
    """In bytes, by the file's own header: its length, JSON with the place of each tensor, the tensors. None where that is none."""
    try:
        length, tensors = header(file)
        return 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error):
        return None


def warnings(config: Config) -> list[str]:
    """One where memory, speed and the arguments of the model's group are those of another model; none where config.json cannot be read,
    which a run refuses, and under smoke=true, where phases before have made the model small."""
    own = _shape(Path(config.model.path)) if config.model.path and not config.smoke else {}
    other = {key: value for key, value in own.items() if value != getattr(config.model, key)}
    if not other:
        return []
    like = [f"model={name}" for name, group in model_rules.files().items() if all(group.get(key) == value for key, value in own.items())]
    has = ", ".join(f"{key} {value}" for key, value in other.items())
    goes_by = ", ".join(str(getattr(config.model, key)) for key in other)
    remedy = " or ".join(like) or "the model= next to it, with its own model.num_layers and so on"
    return [
        f"model.path={config.model.path}: {has} by its config.json, and the plan and the defaults of method.args go by "
        f"model={config.model.name}: {goes_by}. Use: {remedy}."
    ]


def _shape(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: found[name] for key, name in SHAPE.items() if name in found} if isinstance(found, dict) else {}
