"""Test the comparison of published figures with the planner's."""

from __future__ import annotations

import json

import pytest

from launch.estimate import margin
from launch.plan import predictions
from tests.gpu import published

MI355X = "AMD Instinct MI355X"


def test_large_errors_have_reasons_and_all_reasons_are_used():
    rows = [row for section in published.MEMORY.values() for row in section]
    assert [
        row.name
        for row in rows
        if not row.reasons and row.error != "within" and abs(float(row.error.rstrip("%"))) > 5
    ] == []
    assert {reason for row in rows for reason in row.reasons} == set(published.MEMORY_REASONS)
    timed = [row for section in published.SPEED.values() for row in section]
    assert {reason for row in timed for reason in row.reasons} == set(published.SPEED_REASONS)


def test_the_worst_published_memory_is_the_one_that_plans_state():
    rows = [row for row in published.MEMORY["AMD, unlinked reports"] if " to " not in row.stated]
    worst = max(row.number / row.predicted_gb for row in rows)
    assert worst == pytest.approx(margin.WORST_PUBLISHED, abs=0.005)


def test_errors_of_published_ranges():
    def row(stated: str) -> published.PublishedMemory:
        return published.PublishedMemory("Qwen3-0.6B", stated, ["experiment=mi50_baseline"])

    within = row("8 to 12").predicted_gb
    assert [
        row(stated).error for stated in ("8 to 12", "20 to 30", "1 to 2", f"{within}")
    ] == "within below above +0%".split()


def test_the_plan_shows_the_errors_of_today(launch):
    shown = json.loads(predictions.PLAN_ERRORS.read_text())
    for gpu, by_method in published.plan_errors([MI355X, "NVIDIA H100 SXM"]).items():
        for method, errors in by_method.items():
            took = dict(shown[gpu][method])
            assert took.pop("run", "") == errors.pop("run", "")
            assert took == pytest.approx(errors, abs=0.011), "run tests/gpu/published.py"
    factor = f"{shown[MI355X]['sft']['most']:.2g}"
    lines = launch("hardware=mi355x", "mode=plan").out.splitlines()
    words = f"(Llama 3.1 8B, fp8) by another program on this GPU took {factor} times"
    assert words in next(line for line in lines if line.startswith("  evidence"))
