"""Load the text part of a model with a vision tower, and save it next to that tower.

transformers' class of the whole model would train the tower too. Training sees the text model only.
A saved model has the names, the tower and the config.json of its source again, which vLLM loads.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from recipes.models.shards import Shards, read_names, read_tensors

# Names of the text's weights in files -> their names in the text model
TEXT_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
# Names in the text model -> in transformers' class of the whole model, which vLLM accepts too
WHOLE = ("model.", "model.language_model.")
HEAD = "lm_head."
GENERATION, PROCESSORS = "generation_config.json", "*processor_config.json"


def text_part(shape: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text part; `shape` if the model has no other part."""
    text = shape.get_text_config()
    if text is shape or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return shape
    # Either class may have a wrong default. transformers does not tie weights that differ.
    text.tie_word_embeddings = text.tie_word_embeddings or shape.tie_word_embeddings
    # Otherwise the log would list all weights of the tower.
    MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]._keys_to_ignore_on_load_unexpected = ["."]
    return text


def is_part(shape: PretrainedConfig, content: dict[str, Any]) -> bool:
    """Return whether `shape` is the text part of a config.json with this content."""
    return "text_config" in content and not hasattr(shape, "text_config")


def whole_name(name: str) -> str:
    text, whole = WHOLE
    return whole + name.removeprefix(text) if name.startswith(text) else name


def restored(
    tensors: Iterable[tuple[str, torch.Tensor]], source: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the text, named as in `source`, then the other tensors of `source`."""
    prefixes: dict[str, str] = {}
    for name in read_names(source):
        for pattern, target in TEXT_NAMES.items():
            if match := re.match(pattern, name):
                prefixes.setdefault(target, match[0])
    for name, tensor in tensors:
        target = next((target for target in prefixes if name.startswith(target)), "")
        yield prefixes.get(target, "") + name.removeprefix(target), tensor
    yield from read_tensors(source, without=(*prefixes.values(), HEAD))


def restore(text: Path, source: Path, target: Path) -> None:
    """Write the saved text model `text` to `target`, with the tower and files of `source`."""
    shards = Shards(target)
    for name, tensor in restored(read_tensors(text), source):
        shards.add(name, tensor)
    shards.close()
    restore_configs(text, source, target)
    if (text / GENERATION).is_file():
        shutil.copyfile(text / GENERATION, target / GENERATION)


def restore_configs(text: Path, source: Path, target: Path) -> None:
    """Write the configurations of the whole model, with the text's dtype."""
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    saved = json.loads((text / "config.json").read_text(encoding="utf-8"))
    content |= {key: saved[key] for key in ("dtype", "license") if key in saved}
    content["text_config"]["dtype"] = saved["dtype"]
    (target / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for file in source.glob(PROCESSORS):
        shutil.copyfile(file, target / file.name)
