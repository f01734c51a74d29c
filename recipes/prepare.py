"""A model of random weights and its tokenizer, written once, before a server starts that can only read one from a directory.

Started by the launcher, one process:

    python launch/run.py hardware=mi300x topology=split method=grpo model=qwen3_4b model.init=random
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipes.common.data import load_train, texts
from recipes.common.files import move_directory
from recipes.common.model import build_model, build_tokenizer
from recipes.common.program import main, say


def prepare(config: DictConfig) -> dict[str, Any]:
    target = Path(config.run_dir) / "model_init"
    if not target.exists():  # a run that is resumed has it
        staged = target.with_name(f".{target.name}.staging")
        shutil.rmtree(staged, ignore_errors=True)
        tokenizer = build_tokenizer(config, texts(load_train(config.data, config.method.name)))
        model = build_model(config)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        move_directory(staged, target)
    say(f"the model of random weights is in {target}")
    return {}


if __name__ == "__main__":
    main(prepare)
