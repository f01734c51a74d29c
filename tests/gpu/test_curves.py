"""Test the commands of tests/gpu/curves.py, and its comparison of curves."""

from __future__ import annotations

import pytest

from launch.plan.planning import prepare
from tests.conftest import composed
from tests.gpu import curves


@pytest.mark.parametrize("setting", curves.SETTINGS)
def test_each_setting_trains_64_rows_per_step(setting):
    words = curves.job(setting, "bf16", 1).overrides
    config, _ = prepare(composed("hardware=cpu", "model.init=random", *words))
    args = config.method.args
    assert args["per_device_train_batch_size"] * args["gradient_accumulation_steps"] == 64
    assert (config.seed, args["max_steps"], config.precision.name) == (1, curves.STEPS, "bf16")


def all_curves(shift=0.0, first=0.0):
    """Return constant curves whose seeds are 0.1 apart.

    `chosen` ends `shift` higher and begins `first` higher.
    """
    curves_by_key = {key: [2.0 + 0.1 * key[2]] * curves.STEPS for key in curves.combinations()}
    for key in curves_by_key:
        if key[0] == "chosen":
            curves_by_key[key] = [loss + first for loss in curves_by_key[key][:100]] + [
                loss + shift for loss in curves_by_key[key][100:]
            ]
    return curves_by_key


@pytest.mark.parametrize(("shift", "first", "whole"), [
    (0.0, 0.0, True),
    (0.15, 0.0, True),
    (0.25, 0.0, False),
    (0.0, 1e-3, True),
    (0.0, 3e-3, False),
])  # fmt: skip
def test_curves_agree_within_the_spread_of_seeds_and_in_their_first_steps(shift, first, whole):
    assert curves.table(all_curves(shift, first))[1] is whole


def test_a_missing_setting_does_not_agree():
    curves_by_key = {key: losses for key, losses in all_curves().items() if key[0] != "packed"}
    shown, whole = curves.table(curves_by_key)
    assert not whole
    assert "| bf16 | chosen | 0.0e+00 | 2.1000 |" in shown
    assert "packed" not in shown
