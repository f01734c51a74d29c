"""Convert a GGUF file of llama.cpp to a directory for model.path: bf16 weights and tokenizer.

    python -m recipes.from_gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2_135m

For a model that reaches a machine without the hub. transformers reads and dequantizes the file. The
quantization error remains, so the weights are close to the published ones, but not equal. Needs the
package gguf (`make gguf`).
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
    "Use: a whole file of a common architecture, tokenizer included, and the package gguf (make "
    "gguf). llama.cpp's llama-gguf-split --merge joins the files of one model."
)


def convert(file: Path, target: Path) -> int:
    """Write `target`, complete or not at all, and return its number of parameters.

    Raises UserError for a target that cannot be created, and for a file that transformers cannot
    read or that lacks weights.
    """
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: already exists. Remove it, or give another directory.")
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)  # fail before the file is read
        number = write(file, staged)
        move_directory(staged, target)
        return number
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the readers raise any, tokenizers even bare Exceptions
        reason = f"{' '.join(str(error).split()):.300}"
        raise UserError(f"{file} to {target}: {reason}. {REMEDY}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def write(file: Path, target: Path) -> int:
    """Write model and tokenizer, and return the number of parameters."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    loaded, info = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if missing := sorted(info["missing_keys"]):  # transformers has initialized them at random
        raise UserError(
            f"{file}: {len(missing)} of the model's weights are missing, such as {missing[0]}. "
            f"{REMEDY}"
        )
    # transformers cannot save a model loaded from GGUF, so save an equal one without quantization.
    del loaded.config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded.config, dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    # transformers 5.17 gives SmolLM2's tokenizer `<|im_start|>` as its end, so no answer would end.
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
