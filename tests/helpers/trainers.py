"""Build the recipes' trainers for a model of two small layers on a CPU, and run a few steps."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import Trainer, TrainerCallback

from launch.core.json_files import plain
from launch.plan.planning import prepare
from launch.schema.trainer_args import complete
from tests.conftest import composed

SHAPE = {
    "num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1,
    "head_dim": 16, "vocab_size": 320,
}  # fmt: skip
SMALL = [
    *"""
        hardware=cpu topology=single model=tiny precision=fp32 tracking=none speed=off
        data.num_train=32
    """.split(),
    *[f"model.{name}={value}" for name, value in SHAPE.items()],
    *[
        "method.args.max_steps=2",
        "method.args.save_strategy=no",
        "method.args.logging_steps=1",
        "method.args.gradient_checkpointing=false",
    ],
    # The loss of the second step must reflect the first gradient.
    *[
        "method.args.learning_rate=1e-2",
        "method.args.lr_scheduler_type=constant",
        "method.args.warmup_steps=0",
    ],
    "method.args.per_device_train_batch_size=4",
]
METHOD_OVERRIDES = {
    "grpo":["method.args.num_generations=4", "method.args.max_completion_length=6",
        "~method.rewards.reasoning_gym", "+method.rewards.length=0.1"],
}  # fmt: skip
ROWS = [
    {"prompt": f"{n} plus {10**n} ", "completion": f"is {'1 ' * (5 * n % 23)}{n}"}
    for n in range(16)
]
FIGURES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


class Gradients(TrainerCallback):
    """Copy the gradients before each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.steps.append(
            {
                name: weight.grad.clone()
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }
        )


def configured(run_dir: Path, method: str, *overrides: str) -> DictConfig:
    run_dir.mkdir(exist_ok=True)
    defaults = [*SMALL, *METHOD_OVERRIDES.get(method, [])]
    settings, _ = prepare(composed(f"method={method}", *defaults, *overrides))
    return OmegaConf.create(
        {
            **plain(settings),
            "run_dir": str(run_dir),
            "trainer_args": complete(settings, run_dir, (8000, 8001)),
        }
    )


def built(run_dir: Path, method: str, *overrides: str) -> tuple[DictConfig, Trainer]:
    """Return the configuration and the trainer of the recipe, before training."""
    config, trainers = configured(run_dir, method, *overrides), []
    recipe = importlib.import_module(f"recipes.{method}")
    with pytest.MonkeyPatch.context() as patch:
        # A trainer on a CPU sets this variable, which would otherwise remain after the test.
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        patch.setattr(
            recipe, "train", lambda config, trainer, *rest: trainers.append(trainer) or {}
        )
        getattr(recipe, method)(config)
    return config, trainers[0]


def rows_of(tmp_path: Path, rows: list[dict[str, str]] = ROWS) -> list[str]:
    """Return overrides for a file with these rows, by default of unequal lengths."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["data=jsonl", f"data.path={path}", "data.num_train=null"]


def trained(trainer: Trainer) -> tuple[list[dict[str, float]], list[dict[str, torch.Tensor]]]:
    """Train, and return the figures and gradients of each step."""
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [
        {name: line[name] for name in FIGURES if name in line} for line in lines
    ], gradients.steps


def assert_same(ours: tuple, theirs: tuple, within: float = 1e-5) -> None:
    """Assert that two results of `trained` are equal."""
    assert len(ours[0]) == len(theirs[0]) > 0
    for actual, expected in zip(ours[0], theirs[0], strict=True):
        assert actual == pytest.approx(expected, rel=within, abs=within)
    for actual, expected in zip(ours[1], theirs[1], strict=True):
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                actual[name],
                gradient,
                rtol=within,
                atol=within,
                msg=lambda text, name=name: f"{name}: {text}",
            )
