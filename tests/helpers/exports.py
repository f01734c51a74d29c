"""Write a model of two layers, and run method=export in this process."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from launch.config.compose import compose
from launch.core.json_files import plain
from launch.execution import provenance
from launch.plan.planning import prepare
from launch.schema.trainer_args import complete
from recipes.export import export
from recipes.models.model_build import train_tokenizer
from recipes.rank import program


def write_model(folder: Path, seed: int = 0, dtype=torch.float32, **shape) -> Path:
    torch.manual_seed(seed)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    tokenizer = train_tokenizer(["1 + 2 = 3"] * 4, vocab_size=280)
    config = AutoConfig.for_model(
        "qwen3",
        **{**sizes, **shape},
        head_dim=16,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_export(folder: Path, model: Path, *overrides: str) -> tuple[int, dict, Path]:
    """Run an export in a new directory below `folder`. Return exit code, result and directory."""
    run_dir = folder / f"run{len(list(folder.glob('run*')))}"
    run_dir.mkdir()
    settings, _ = prepare(
        compose(["hardware=cpu", "method=export", f"model.path={model}", *overrides])
    )
    content = {
        **plain(settings),
        "run_dir": str(run_dir),
        "trainer_args": complete(settings, run_dir, (8000, 8001)),
    }
    content["provenance"] = provenance.of(settings)
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
    code = program.run(export, ["--config", str(run_dir / "config.yaml")])
    return code, json.loads((run_dir / "result.json").read_text()), run_dir
