"""Convert a GGUF file to a directory with bf16 weights and tokenizer, for model.path.

    python -m recipes.from_gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2_135m

This is for machines that have a model only as GGUF, because they cannot reach the hub. transformers
reads and dequantizes the file. The quantization error remains, so the weights are only close to the
published ones. The program needs the package gguf (`make gguf`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.core.errors import EXIT_USER, UserError
from recipes.rank.files import move_directory

REMEDY = (
    "Use a complete GGUF file with a tokenizer, of an architecture that transformers supports, and "
    "install the package gguf (make gguf). To join split files: llama-gguf-split --merge."
)


def convert(file: Path, target: Path) -> int:
    """Write the directory `target` atomically, and return the number of parameters.

    Raises UserError if `target` cannot be created, or if the file is incomplete or unreadable.
    """
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: already exists. Remove it, or use another directory.")
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)  # fail before reading the file
        number = write(file, staged)
        move_directory(staged, target)
        return number
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the readers raise many types, tokenizers even Exception
        reason = f"{' '.join(str(error).split()):.300}"
        raise UserError(f"cannot convert {file} to {target}: {reason}. {REMEDY}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def write(file: Path, target: Path) -> int:
    """Write model and tokenizer, and return the number of parameters."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    loaded, info = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if missing := sorted(info["missing_keys"]):  # transformers gives them random values
        raise UserError(
            f"{file}: {len(missing)} of the model's weights are missing, such as {missing[0]}. "
            f"{REMEDY}"
        )
    # transformers cannot save a model loaded from GGUF, so copy the weights into another model.
    del loaded.config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded.config, dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    # transformers 5.17 sets SmolLM2's end token to `<|im_start|>`, so generation would not stop.
    for kind in ("bos", "eos", "pad"):
        number = getattr(model.config, f"{kind}_token_id")
        if number is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return model.num_parameters()


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
