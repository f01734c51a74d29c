"""Test that kernels in bf16 are near fp32, and that a wrong or failing kernel is named."""

import pytest
from omegaconf import OmegaConf

from launch.config.compose import compose
from launch.plan.planning import make_plan, prepare, rank_config
from recipes.bench import numerics
from recipes.rank.program import Failed
from tests.conftest import host_with

SIZES = {"sequence": 24, "steps": 2}


def compare(run_dir, **args):
    """Return the outcome of a kernel's pass by (kernel, pass)."""
    overrides = [f"method.args.{key}={value}" for key, value in (SIZES | args).items()]
    overrides += ["hardware=cpu", "precision=bf16", "method=bench/numerics", "model.num_layers=1"]
    config, _ = prepare(compose(overrides))
    plan = make_plan(config, host_with(0), run_dir)
    try:
        content = numerics.numerics(OmegaConf.create(rank_config(plan)))
    except Failed as failed:
        content = failed.result
    return {(row["kernel"], row["pass"]): row for row in content["rows"]}


def is_within(row):
    return row["error"] is None and row["max_error"] <= row["tolerance"]


def test_a_wrong_gradient_of_the_loss_is_above_its_tolerance(tmp_path, monkeypatch):
    correct = numerics.head.sums

    def wrong(hidden, weight, targets):
        hidden.register_hook(lambda gradient: 1.2 * gradient)
        return correct(hidden, weight, targets)

    monkeypatch.setattr(numerics.head, "sums", wrong)
    rows = compare(tmp_path, compiled_norm=False)
    assert [case for case, row in rows.items() if not is_within(row)] == [("loss", "backward")]
    assert rows["loss", "backward"]["max_error"] == pytest.approx(0.2, abs=0.02)
    rounded = rows["attention", "backward"]
    assert 1e-4 < rounded["mean_error"] < rounded["max_error"]
    assert rounded["dtype"] == "bfloat16"


def test_a_kernel_that_fails_is_reported_and_the_others_are_compared(tmp_path, monkeypatch):
    def broken(hidden, weight):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(numerics.torch, "compile", lambda kernel: broken)
    rows = compare(tmp_path, compiled_norm=True)
    assert {case[0] for case, row in rows.items() if not is_within(row)} == {"compiled norm"}
    assert rows["compiled norm", "backward"]["error"] == "no kernel image is available"
    assert rows["optimizer", "update"]["mean_error"] > 0
