"""Compare the planner with steps of TRL that were measured on an H100.

Steps are eager, with Liger, and compiled, with and without checkpointing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import predictions

RESULTS = Path(__file__).parents[2] / "docs/results"
ROWS = [json.loads(line) for line in (RESULTS / "measured_steps.jsonl").read_text().splitlines()]
GIB = 2**30


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_speed_within_15_percent_and_memory_within_5(row):
    memory, speed = predictions.planned(row["overrides"])
    assert speed.tokens_per_second == pytest.approx(row["tokens_per_second"], rel=0.15)
    if "peak_gib" in row:
        assert memory.allocated_gb * 1e9 / GIB == pytest.approx(row["peak_gib"], rel=0.05)


def test_every_recorded_prediction_has_a_configuration():
    predicted = [
        json.loads(line) for line in (RESULTS / "predicted.jsonl").read_text().splitlines()
    ]
    assert {row["name"] for row in predicted} <= set(predictions.HELD_OUT)
    assert all(row["predicted"]["step_s"] > 0 and row["chosen"]["step.rows"] for row in predicted)


@pytest.mark.parametrize("key", ["peak_gb", "step_s"])
def test_layers_that_recompute_trade_memory_for_time(key):
    base = (
        "hardware=h100 model=qwen3_1_7b topology=single method.args.max_length=4096 "
        "step.compile=true speed=off"
    ).split()
    some = [[*base, f"step.checkpointed_layers={n}"] for n in (1, 14, 28)]
    plans = [
        predictions.planned(overrides)
        for overrides in ([*base, "method.args.gradient_checkpointing=false"], *some, base)
    ]
    figures = (
        [memory.allocated_gb for memory, _ in plans]
        if key == "peak_gb"
        else [-speed.step_s for _, speed in plans]
    )
    assert figures == sorted(figures, reverse=True)
    assert figures[-1] == figures[-2]  # the model has 28 layers
