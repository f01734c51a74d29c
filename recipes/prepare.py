"""Write a model with random weights and its tokenizer to a directory that vLLM serves.

The launcher starts this program, one process:

    python launch/run.py hardware=mi300x topology=split method=grpo model=qwen3_4b model.init=random
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from recipes.data.data_load import run_texts
from recipes.models.model_build import build_tokenizer, model_directory, write_random
from recipes.rank.program import main, say


def prepare(config: DictConfig) -> dict[str, Any]:
    directory = model_directory(config)
    if directory is None:  # a resumed run has it already
        directory = write_random(config, build_tokenizer(config, run_texts(config)))
    say(f"the model with random weights is in {directory}")
    return {}


if __name__ == "__main__":
    main(prepare)
