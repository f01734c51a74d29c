"""Test the planned memory that torch's allocator holds in free pieces, and its warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.estimate import margin
from launch.plan.planning import make_plan, prepare
from launch.schema.plan import Memory, Plan
from tests.conftest import composed, host_with

SFT = "method=sft model=qwen3_4b model.init=random topology=single method.args.max_length=2048"
PAGES = "user_env.PYTORCH_ALLOC_CONF=expandable_segments:True"
EXPANDABLE = "user_env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def plan_of(rows: int, *overrides: str) -> Plan:
    base = f"{SFT} hardware=h200 method.args.gradient_accumulation_steps=1"
    batch = f"method.args.per_device_train_batch_size={rows}"
    config, _ = prepare(composed(*base.split(), batch, *overrides))
    return make_plan(config, host_with(8), Path("/runs/x/1"))


def test_free_pieces_are_the_size_of_checkpoints_and_logits():
    """32 rows of 2,048 tokens had a peak of 90.03 GB on an H200 (2026-11-25)."""
    planned = plan_of(32).memory[0]
    checkpoints, logits = 36 * 32 * 2048 * 2560 * 4, 4096 * 151936 * 2
    assert planned.scattered_gb == pytest.approx((checkpoints + logits) / 1e9)
    assert planned.allocated_gb == pytest.approx(90.03, rel=0.03)


@pytest.mark.parametrize(("rows", "overrides", "warns"), [
    (32, [], False),
    (64, [], True),
    (64, ["user_env.PYTORCH_ALLOC_CONF=max_split_size_mb:512"], True),
    (64, [EXPANDABLE], False),
    (80, [EXPANDABLE, "hardware=mi300x"], True),
    (64, ["hardware=cpu"], False),
])  # fmt: skip
def test_plan_warns_of_fragmentation(rows, overrides, warns):
    plan = plan_of(rows, *overrides)
    assert any("fragmentation" in warning for warning in plan.warnings) == warns


@pytest.mark.parametrize(("total", "scattered", "overrides", "remedy"), [
    (80.0, 30.0, SFT, f"Use: {PAGES}, or a smaller"),
    (96.0, 30.0, SFT, f"Use: {PAGES}, and a smaller"),
    (96.0, 0.0, SFT, "Use: a smaller"),
    (80.0, 30.0, "method=grpo topology=colocate model=qwen3_4b", "Use: a smaller"),
    (80.0, 30.0, f"{SFT} hardware=mi300x", "Use: a smaller"),
])  # fmt: skip
def test_expandable_segments_are_offered_if_they_help(total, scattered, overrides, remedy):
    entry = Memory("trainers", 0, {"weights": total}, 100.0, scattered_gb=scattered)
    config, _ = prepare(composed("hardware=h200", *overrides.split()))
    (warning,) = margin.warnings(config, [entry])
    assert remedy in warning


def test_pieces_and_the_error_add_up():
    """GRPO of 4B with 16 rows in a micro-batch ran out of memory on an H100 (2026-11-27)."""
    entry = Memory("trainers", 1, {"weights": 80.14}, 85.04, scattered_gb=4.03)
    assert margin.close(entry)
    assert f"{80.14 * (1 + entry.error) + 4.03:.1f} GB" in margin.why(entry)
