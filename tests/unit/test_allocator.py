"""What torch's allocator holds beside what is in use, and when the planner warns of it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from launch.plan import Plan, make_plan, prepare
from launch.planner import fit, margin
from tests.conftest import composed, host_with
from tests.gpu.jobs import ROOT
from tests.unit import counted
from tests.unit.allocator import MIB, Allocator, Event, OutOfMemory, training

SFT = ["method=sft", "model=qwen3_4b", "model.init=random", "topology=single", "method.args.max_length=2048"]
H200 = 149.3e9  # bytes of an H200 that torch may ask for


@functools.cache
def events(model: str, rows: int, checkpointing: bool = True) -> list[Event]:
    shape = SimpleNamespace(**OmegaConf.load(ROOT / f"conf/model/{model}.yaml"))
    with pytest.MonkeyPatch.context() as patch, counted.as_on_a_gpu(patch):
        return training(shape, rows, 2048, checkpointing)


def plan_of(rows: int, *given: str) -> Plan:
    overrides = [*SFT, "hardware=h200", f"{fit.BATCH}={rows}", "method.args.gradient_accumulation_steps=1", *given]
    config, _ = prepare(composed(*overrides))
    return make_plan(config, host_with(8), Path("/runs/x/1"))


def test_as_measured_on_an_h200():
    """2026-11-25: 32 rows of 2,048 tokens trained with 90.03 GB at their peak, 64 rows were out of memory in their second step."""
    assert Allocator(H200).replay(events("qwen3_4b", 32)).allocated / 1e9 == pytest.approx(90.03, abs=0.5)
    with pytest.raises(OutOfMemory):
        Allocator(H200).replay(events("qwen3_4b", 64))


def test_what_is_left_in_pieces_is_no_more_than_planned():
    """All that is held besides what is in use, on a GPU that has just enough."""
    planned = plan_of(32).memory[0]
    assert planned.allocated_gb == pytest.approx(90.03, rel=0.01)
    enough = planned.allocated_gb + planned.scattered_gb
    Allocator(enough * 1e9).replay(events("qwen3_4b", 32))
    with pytest.raises(OutOfMemory):
        Allocator(1.2 * planned.allocated_gb * 1e9).replay(events("qwen3_4b", 32))


def test_large_blocks_kept_whole_leave_nearly_none():
    kept = Allocator(H200, 512 * MIB).replay(events("qwen3_4b", 64))
    assert kept.allocated / 1e9 == pytest.approx(plan_of(64).memory[0].allocated_gb, rel=0.01)
    Allocator(1.05 * kept.allocated, 512 * MIB).replay(events("qwen3_4b", 64))


def test_next_to_nothing_is_left_in_pieces_where_every_layer_is_kept():
    Allocator(1.05 * 116.1e9).replay(events("qwen3_4b", 4, checkpointing=False))
    assert plan_of(4, "method.args.gradient_checkpointing=false").memory[0].scattered_gb == 0


@pytest.mark.parametrize(
    ("rows", "given", "warned"),
    [
        (32, (), False),
        (64, (), True),
        (64, (margin.KEEP_WHOLE,), False),
        (64, ("user_env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",), False),
        (64, ("user_env.PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8",), True),
    ],
)
def test_the_plan_warns_where_pieces_may_not_leave_enough(rows, given, warned):
    said = [warning for warning in plan_of(rows, *given).warnings if "in pieces" in warning]
    assert len(said) == warned
    assert all(f"Use: {margin.KEEP_WHOLE}, or a smaller method.args.per_device_train_batch_size (now {rows})" in one for one in said)


def test_a_search_names_a_batch_that_surely_fits_and_what_would_make_it_larger():
    overrides = [*SFT, "hardware=h200"]
    _, finding = fit.search(composed(*overrides, "mode=plan", "find=largest_batch"), overrides, host_with(8))
    roomy = re.search(r"with more room: \S+=(\d+), or more of them with (\S+)", finding["said"][1])
    assert roomy
    assert roomy[2] == margin.KEEP_WHOLE
    Allocator(H200).replay(events("qwen3_4b", int(roomy[1])))
