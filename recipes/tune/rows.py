"""Write rows that fill a whole sequence, so that every step has the same shape."""

from __future__ import annotations

import json
import random
from pathlib import Path

CHARACTERS = 4  # digits per token; no tokenizer in use joins more than three into a token


def full_rows(path: Path, recipe: str, length: int, count: int, seed: int) -> None:
    """Write `count` rows of at least `length` tokens for sft or dpo; the trainer cuts them.

    An existing file is not changed.
    """
    if path.exists():
        return
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".staged")
    with staged.open("w") as file:
        for _ in range(count):
            digits = "".join(rng.choices("0123456789", k=CHARACTERS * length))
            row = (
                {"text": digits}
                if recipe == "sft"
                else {"prompt": digits[:CHARACTERS], "chosen": digits, "rejected": digits[::-1]}
            )
            file.write(json.dumps(row) + "\n")
    staged.replace(path)
