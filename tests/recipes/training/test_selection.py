"""Test method.selection without training; tests/e2e/test_best_checkpoint.py trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import TrainerState

from launch.core.errors import UserError
from launch.plan.planning import prepare
from launch.rules.check import check
from launch.schema.trainer_args import complete
from recipes.training import selection
from tests.conftest import composed

TRAINED = [
    (method, metric)
    for method in ("sft", "dpo", "grpo")
    for metric in composed("hardware=cpu", f"method={method}").method.held_out_metrics
]


@pytest.mark.parametrize(("method", "metric"), TRAINED)
def test_evaluate_at_every_save(method, metric):
    overrides = ["hardware=cpu", f"method={method}", f"method.selection.metric={metric}"]
    overrides += ["model=qwen3_0_6b", "topology=single", "method.args.save_steps=30"]
    config, _ = prepare(composed(*overrides, "method.args.per_device_train_batch_size=8"))
    args = complete(config, Path("/runs/1"), (8000, 8001))
    assert (args["eval_strategy"], args["eval_steps"], args["save_steps"]) == ("steps", 30, 30)
    often = composed(*overrides, "method.args.eval_steps=10")
    assert complete(often, Path("/runs/1"), (8000, 8001))["eval_steps"] == 10
    assert args["metric_for_best_model"] == metric
    assert args["greater_is_better"] is (metric != "eval_loss")
    assert args["per_device_eval_batch_size"] == 8
    assert args["eval_on_start"] is (method != "grpo")  # answers take long
    assert args.get("num_generations_eval") == (1 if method == "grpo" else None)


def load_best(**state):
    options = {"metric": "eval_loss", "patience": 2, "min_delta": 0.5}
    config = OmegaConf.create({"method": {"selection": options}})
    return selection.load_best(config, SimpleNamespace(state=TrainerState(**state)))


def test_reject_nan_metrics():
    """Use the state of a training that diverged, which has no best step."""
    with pytest.raises(UserError, match=r"metric=eval_loss.*method.args.learning_rate"):
        load_best(global_step=4, max_steps=4, best_metric=float("inf"))


def test_stopped_early_with_the_last_model_as_best():
    """Use the state of a training that improved by less than min_delta."""
    actual = load_best(global_step=6, max_steps=9, best_metric=0.9, best_global_step=6)
    assert actual == {"best_step": 6, "best_eval_loss": 0.9, "stopped_early": True}


@pytest.mark.parametrize(("method", "metric", "argument"), [
    ("sft", "eval_loss", "eval_packing=true"),
    ("grpo", "eval_reward", "num_generations_eval=1"),
])  # fmt: skip
def test_reject_evaluation_arguments_without_metric(method, metric, argument):
    key = argument.split("=")[0]
    message = f"method.args.{key} takes no effect .*Use: method.selection.metric={metric}"
    with pytest.raises(UserError, match=message):
        check(composed("hardware=cpu", f"method={method}", f"method.args.{argument}"))
