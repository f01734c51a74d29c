"""A model of random weights and its tokenizer, written once, before a server starts that can only read one from a directory.

Started by the launcher, one process:

    python launch/run.py hardware=mi300x topology=split method=grpo model=qwen3_4b model.init=random
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from recipes.common.data import load_train, texts
from recipes.common.model import build_tokenizer, model_directory, write_random
from recipes.common.program import main, say


def prepare(config: DictConfig) -> dict[str, Any]:
    # A run that is resumed has it.
    made = model_directory(config) or write_random(config, build_tokenizer(config, texts(load_train(config.data, config.method.name))))
    say(f"the model of random weights is in {made}")
    return {}


if __name__ == "__main__":
    main(prepare)
