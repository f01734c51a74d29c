"""Check that `model.path` is complete, and read the models of conf/model."""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import Any

from launch.core.errors import UserError
from launch.core.json_files import read_json, yaml_file
from launch.inputs.adapter_files import header
from launch.inputs.reading import json_object
from launch.schema import Config
from launch.schema.enums import Init
from launch.schema.trainer_args import lock, value_or_none

MODELS = Path(__file__).parents[2] / "conf/model"

# Each file is a tokenizer or its vocabulary. Without one of them, transformers silently creates an
# empty tokenizer.
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
LFS, LFS_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # of a pointer file
# Names of models on the Hub that have a chat template. Qwen3 has it unless it is a base model.
INSTRUCT = re.compile(r"instruct|-it\b|-chat\b|gpt-oss|qwen3-(?!.*-base)", re.IGNORECASE)
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


def check(config: Config, path: Path, reads_tokenizer: bool) -> None:
    """Raise UserError for damaged or missing files, and for a model that ranks cannot load.

    Reading tokenizer.json takes up to a second. recipes/models/pretrained.py checks what needs
    transformers, such as the end token.
    """
    tokenizer_files = [file for pattern in TOKENIZERS for file in path.glob(pattern)]
    for file in (*tokenizer_files, *_weights(path)):
        if file.is_file() and file.stat().st_size < LFS_BYTES and LFS in file.read_bytes():
            raise UserError(
                f"{file}: only Git LFS's pointer to the file. Use: git lfs pull, in the clone that "
                "it comes from, and copy it again."
            )
    content = json_object(path / "config.json")
    for name in (*OPTIONAL, *(["tokenizer.json"] if reads_tokenizer else [])):
        if (path / name).is_file():
            json_object(path / name)
    if not tokenizer_files:
        raise UserError(
            f"model.path={path}: no tokenizer. A model directory needs tokenizer.json (or "
            f"{', '.join(TOKENIZERS[1:-1])}). Use: the tokenizer files of the original model."
        )
    for file in _weights(path):
        if not file.is_file():
            source = INDEX if (path / INDEX).is_file() else "a link"
            raise UserError(
                f"{file}: missing, although {source} refers to it. Copy or download it."
            )
        size, full_size = file.stat().st_size, _full_size(file)
        if size != full_size:
            header_size = f"its header requires {full_size:,}" if full_size else "it has no header"
            raise UserError(
                f"{file}: damaged: {size:,} bytes, but {header_size}. Copy or download it again."
            )
    _check_type(config, path, content)


def _check_type(config: Config, path: Path, content: dict[str, Any]) -> None:
    """Raise UserError if transformers has no text model of this type.

    vLLM and method=export do not need one. The user's own environment may have other versions.
    """
    is_locked = config.container.name != "custom" and not config.runtime.slurm.python
    if not is_locked or config.method.exports or value_or_none(config, "engine") == "vllm":
        return
    kind, text = content.get("model_type"), content.get("text_config")
    kinds = {kind, text.get("model_type") if isinstance(text, dict) else kind}
    if kinds & {*lock()["model_types"]}:
        return
    needs = f"transformers {lock()['transformers']} has no text-generation model of this type"
    if "auto_map" in content:
        needs += ", and code in a model directory is not run"
    raise UserError(
        f"{path}/config.json: model_type {kind}: {needs}. Use: "
        "model.path=<directory of a supported model>."
    )


def chat_template(config: Config) -> str | None:
    """Return the tokenizer's chat template; None if it is not in a local file."""
    model = config.model
    folder = Path(model.path) if model.path else None
    override = model.chat_template or config.data.chat_template
    file = Path(override) if override else folder and folder / "chat_template.jinja"
    if file and file.is_file():
        return file.read_text(encoding="utf-8-sig", errors="replace")
    settings = read_json(folder / "tokenizer_config.json") if folder and not override else None
    return str(settings["chat_template"]) if settings and "chat_template" in settings else None


def has_chat_template(config: Config) -> bool:
    """Return whether the tokenizer has a chat template, as far as local files and names tell."""
    model = config.model
    if model.chat_template or config.data.chat_template:
        return True
    if model.path:
        return chat_template(config) is not None
    return model.init == Init.pretrained and INSTRUCT.search(model.hub_id or "") is not None


def lacks_chat_template(config: Config) -> bool:
    """Return whether local files show that the tokenizer has no chat template."""
    folder = config.model.path
    has_tokenizer = folder is not None and (Path(folder) / "tokenizer_config.json").is_file()
    return has_tokenizer and not has_chat_template(config)


def _weights(path: Path) -> list[Path]:
    """Return the files that transformers loads: those in the index, model.safetensors, or all."""
    if (path / INDEX).is_file():
        names = json_object(path / INDEX).get("weight_map")
        if isinstance(names, dict):
            return [path / name for name in sorted(set(map(str, names.values())))]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    return sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))


def _full_size(file: Path) -> int | None:
    """Return the size in bytes that a file's header requires; None if it has no header."""
    try:
        length, tensors = header(file)
        ends = (tensor["data_offsets"][1] for tensor in tensors.values())
        return 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error):
        return None


@functools.cache
def file(name: str) -> dict[str, Any]:
    """Return the content of a model's file in conf/model; {} if there is none."""
    path = MODELS / f"{name}.yaml"
    content: dict[str, Any] = yaml_file(path) if path.is_file() else {}
    return content


def files() -> dict[str, dict[str, Any]]:
    """Return the content of every file in conf/model by name."""
    return {path.stem: file(path.stem) for path in sorted(MODELS.glob("*.yaml"))}
