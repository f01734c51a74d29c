"""A model in a GGUF file, as llama.cpp has them, made a directory that model.path takes: weights in bf16, tokenizer, chat template.

    python -m recipes.from_gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2_135m

For a model that reaches a machine without the hub. transformers reads and dequantizes the file; what its quantization lost stays lost, so
the weights are near the published ones and not equal to them. Needs the package gguf (`make gguf`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipes.common.errors import UserError
from recipes.common.files import move_directory
from recipes.common.gguf_header import WHOLE, check_header

MAGIC = b"GGUF"
EXIT_USER = 2


def convert(file: Path, target: Path) -> int:
    """Write `target` from `file` and return how many parameters it holds. `target` is whole or not there.

    Raises UserError for a file that is no GGUF, a target that is there or cannot be made, a missing package, an architecture that
    transformers cannot read from GGUF, a header that claims more than the file holds, weights that are not finite, and a file that lacks
    weights or a tokenizer.
    """
    check(file, target)
    model, tokenizer = read(file, check_header(file))
    check_finite(file, model)
    name_ends(tokenizer, model)
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    move_directory(staged, target)
    return model.num_parameters()


def read(file: Path, elements: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a file whose tensors hold so many numbers. Raises UserError."""
    given: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with told(file):
        needed = empty(AutoConfig.from_pretrained(**given), torch.bfloat16).num_parameters()
    if needed > elements:
        raise UserError(f"{file}: its header describes {needed:,} parameters, and its tensors hold {elements:,}. {WHOLE}")
    with told(file):
        loaded, found = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.bfloat16, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**given)
    lacking = sorted(found["missing_keys"])
    if lacking:  # transformers has drawn them by chance
        raise UserError(f"{file}: it lacks {len(lacking)} of the model's weights, such as {lacking[0]}. {WHOLE}")
    with told(file):  # weights of another shape than the header says
        return plain(loaded), tokenizer


@contextlib.contextmanager
def told(file: Path) -> Iterator[None]:
    """Whatever transformers raises of a file, as a UserError; the package tokenizers raises bare Exceptions."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"{file}: transformers cannot read it ({said:.300}). It takes the common architectures, tokenizer included."
        ) from error


def check(file: Path, target: Path) -> None:
    """Raises UserError for what can be known before the file is read."""
    if not file.is_file():
        raise UserError(f"{file}: no such file. Give a GGUF file and the directory to make.")
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"{file}: it cannot be read: {error.strerror}. Give a file that you may read.") from error
    if magic != MAGIC:
        raise UserError(
            f"{file}: it does not begin with {MAGIC.decode()}, so it is no GGUF file. Safetensors need no conversion: model.path."
        )
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: exists already. Remove it, or give another directory.")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{target}: cannot be made, since {above} is no directory that you may write to. Give another place.")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file}: transformers reads it with the package gguf, which is not installed. Use: make gguf.")


def plain(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that knows of no quantization: transformers saves none that came from GGUF."""
    config = loaded.config
    del config.quantization_config
    model = empty(config, loaded.dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def empty(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def check_finite(file: Path, model: PreTrainedModel) -> None:
    """Raises UserError for the first weight that is no number: no model computes with it."""
    for name, weight in model.state_dict().items():
        bad = weight.numel() - int(torch.isfinite(weight).sum())
        if bad:
            raise UserError(f"{file}: {bad:,} of {weight.numel():,} numbers of {name} are not finite, so it is damaged. Fetch it again.")


def name_ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """The tokens that begin, end and pad a text, as the file's ids say. transformers 5.17 gives the tokenizer of SmolLM2 `<|im_start|>`
    for its end, after which no answer would ever end."""
    for kind in ("bos", "eos", "pad"):
        number = getattr(model.config, f"{kind}_token_id")
        if number is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args(argv)
    try:
        count = convert(given.file, given.directory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    print(f"{given.directory}: {count:,} parameters in bf16. Use it by model.path={given.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
