"""Convert a GGUF file of llama.cpp to a directory for model.path: bf16 weights and tokenizer.

    python -m recipes.from_gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2_135m

For a model that reaches a machine without the hub. transformers reads and dequantizes the file.
What its quantization lost stays lost, so the weights are near the published ones and not equal to
them. Needs the package gguf (`make gguf`).
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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from launch.core.errors import UserError
from recipes.rank.files import move_directory

EXIT_USER = 2
WHOLE = (
    "Give the whole file; of a model in several, the one that llama.cpp's llama-gguf-split "
    "--merge makes of them."
)


def convert(file: Path, target: Path) -> int:
    """Write `target`, complete or not at all, and return its number of parameters.

    Raises UserError for a file or target that cannot be used, a missing package, an architecture
    that transformers cannot read from GGUF, missing weights, and weights that are not finite.
    """
    check(file, target)
    model, tokenizer = read(file)
    check_finite(file, model)
    name_ends(tokenizer, model)
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    move_directory(staged, target)
    return model.num_parameters()


def read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer, after a check that the file holds what its header describes.

    Without it, transformers would allocate whatever the header of a damaged file claims.
    """
    from gguf import GGUFReader

    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with readable(file):
        elements = sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
        needed = empty(AutoConfig.from_pretrained(**source), torch.bfloat16).num_parameters()
    if needed > elements:
        raise UserError(
            f"{file}: its header describes {needed:,} parameters, and its tensors hold "
            f"{elements:,}. {WHOLE}"
        )
    with readable(file):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    missing = sorted(info["missing_keys"])
    if missing:  # transformers has initialized them at random
        raise UserError(
            f"{file}: it lacks {len(missing)} of the model's weights, such as {missing[0]}. {WHOLE}"
        )
    with readable(file):  # the shapes of weights may differ from those in the header
        return plain(loaded), tokenizer


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn any exception of the readers into a UserError; tokenizers raises bare Exceptions."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{file}: transformers cannot read it ({reason:.300}). It takes the common "
            f"architectures, tokenizer included. {WHOLE}"
        ) from error


def check(file: Path, target: Path) -> None:
    """Reject unusable arguments before the file is read."""
    if not file.is_file():
        raise UserError(f"{file}: no such file. Give a GGUF file and the directory to make.")
    try:
        with file.open("rb") as content:
            magic = content.read(4)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}.") from error
    if magic != b"GGUF":
        raise UserError(
            f"{file}: it does not begin with GGUF, so it is not a GGUF file. Safetensors need no "
            "conversion: model.path."
        )
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: exists already. Remove it, or give another directory.")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(
            f"{target}: cannot be made, since {above} is not a directory that you may write to. "
            "Give another place."
        )
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file}: it is read with the package gguf. Use: make gguf.")


def plain(loaded: PreTrainedModel) -> PreTrainedModel:
    """Return an equal model without quantization: transformers cannot save one loaded from GGUF."""
    config = loaded.config
    del config.quantization_config
    model = empty(config, loaded.dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def empty(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def check_finite(file: Path, model: PreTrainedModel) -> None:
    """Reject weights that are not finite."""
    for name, weight in model.state_dict().items():
        bad = weight.numel() - int(torch.isfinite(weight).sum())
        if bad:
            raise UserError(
                f"{file}: {bad:,} of {weight.numel():,} numbers of {name} are not finite, so it is "
                "damaged. Fetch it again."
            )


def name_ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Set the tokens that begin, end and pad a text, by the ids in the file.

    transformers 5.17 gives SmolLM2's tokenizer `<|im_start|>` as its end, so no answer would end.
    """
    for kind in ("bos", "eos", "pad"):
        number = getattr(model.config, f"{kind}_token_id")
        if number is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args(argv)
    try:
        count = convert(args.file, args.directory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    print(f"{args.directory}: {count:,} parameters in bf16. Use: model.path={args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
