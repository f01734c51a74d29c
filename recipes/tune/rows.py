"""Rows that fill a sequence to its last token, whatever the tokenizer: for trials that must have the same shapes in every step."""

from __future__ import annotations

import json
import random
from pathlib import Path

CHARACTERS = 4  # for each token: of digits no tokenizer in use makes more than three one token


def full_rows(path: Path, recipe: str, length: int, count: int, seed: int) -> None:
    """Write `count` rows of at least `length` tokens each for recipe sft or dpo; the trainer cuts them. An existing file is kept."""
    if path.exists():
        return
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".staged")
    with staged.open("w") as file:
        for _ in range(count):
            digits = "".join(rng.choices("0123456789", k=CHARACTERS * length))
            row = {"text": digits} if recipe == "sft" else {"prompt": digits[:CHARACTERS], "chosen": digits, "rejected": digits[::-1]}
            file.write(json.dumps(row) + "\n")
    staged.replace(path)
