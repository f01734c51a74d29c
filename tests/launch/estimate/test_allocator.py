"""Torch's allocator: what it holds besides what is in use, and when the planner warns of it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from launch.config.request import Request
from launch.estimate import margin
from launch.estimate.activations import MicroStep, Numerics
from launch.estimate.memory import OVERHEAD_GB
from launch.plan.planning import make_plan, prepare
from launch.schema.enums import Head
from launch.schema.plan import Memory, Plan
from launch.search import fit
from tests.conftest import composed, host_with
from tests.gpu.jobs import ROOT
from tests.helpers import counted
from tests.helpers.allocator import MIB, NO_LIMIT, Allocator, Event, OutOfMemory, training

SFT = [
    "method=sft",
    "model=qwen3_4b",
    "model.init=random",
    "topology=single",
    "method.args.max_length=2048",
]
LAYERS = 12  # of the smaller replays


@functools.cache
def events(
    model: str, numerics: str, rows: int, checkpointing: bool = True, layers: int | None = None
) -> list[Event]:
    shape = SimpleNamespace(**OmegaConf.load(ROOT / f"conf/model/{model}.yaml"))
    shape.num_layers = layers or shape.num_layers
    with pytest.MonkeyPatch.context() as patch, counted.as_on_a_gpu(patch):
        return training(shape, numerics, rows, 2048, checkpointing)


def needed(found: list[Event], max_split: int = NO_LIMIT) -> tuple[float, float]:
    """Return bytes in use at most, and of the smallest GPU that suffices, within half a percent."""
    roomy = Allocator(1e15, max_split).replay(found)
    low, high = float(roomy.allocated), float(roomy.reserved)
    while high - low > 0.005 * roomy.allocated:
        middle = (low + high) / 2
        try:
            Allocator(middle, max_split).replay(found)
            high = middle
        except OutOfMemory:
            low = middle
    return roomy.allocated, high


def plan_of(rows: int, *given: str) -> Plan:
    overrides = [
        *SFT,
        "hardware=h200",
        f"{fit.BATCH}={rows}",
        "method.args.gradient_accumulation_steps=1",
        *given,
    ]
    config, _ = prepare(composed(*overrides))
    return make_plan(config, host_with(8), Path("/runs/x/1"))


H200 = 1e9 * (plan_of(1).memory[0].capacity_gb - OVERHEAD_GB)


def test_as_measured_on_an_h200():
    """32 rows of 2,048 tokens trained with 90.03 GB at their peak (2026-11-25).

    64 rows were out of memory in their second step.
    """
    assert Allocator(H200).replay(
        events("qwen3_4b", "autocast", 32)
    ).allocated / 1e9 == pytest.approx(90.03, abs=0.5)
    with pytest.raises(OutOfMemory):
        Allocator(H200).replay(events("qwen3_4b", "autocast", 64))


@pytest.mark.parametrize(
    ("model", "numerics", "rows"),
    [
        ("qwen3_0_6b", "autocast", 32),
        ("qwen3_4b", "autocast", 16),
        ("qwen3_4b", "cast", 32),
        ("qwen2_5_1_5b", "fp32", 16),
    ],
)
def test_what_is_left_in_pieces_is_no_more_than_planned(model, numerics, rows):
    in_use, enough = needed(events(model, numerics, rows, layers=LAYERS))
    shape = OmegaConf.merge(
        OmegaConf.load(ROOT / f"conf/model/{model}.yaml"), {"num_layers": LAYERS}
    )
    planned = MicroStep(
        shape, Numerics(numerics), rows, 2048, None, checkpointing=True, head=Head.summed
    ).scattered()
    assert 0.1 * planned < enough - in_use < planned


def test_the_plan_has_the_checkpoints_beside_what_is_in_use():
    planned = plan_of(32).memory[0]
    assert planned.scattered_gb == pytest.approx(
        (36 * 32 * 2048 * 2560 * 4 + 4096 * 151936 * 2) / 1e9
    )
    enough = planned.allocated_gb + planned.scattered_gb
    Allocator(enough * 1e9).replay(events("qwen3_4b", "autocast", 32))
    with pytest.raises(OutOfMemory):
        Allocator(1.2 * planned.allocated_gb * 1e9).replay(events("qwen3_4b", "autocast", 32))


def test_large_blocks_kept_whole_leave_little():
    in_use, enough = needed(events("qwen3_4b", "autocast", 64), 128 * MIB)
    assert in_use / 1e9 == pytest.approx(plan_of(64).memory[0].allocated_gb, rel=0.01)
    assert enough < 1.02 * in_use


def test_next_to_nothing_is_left_in_pieces_where_every_layer_is_kept():
    in_use, enough = needed(events("qwen3_4b", "autocast", 4, checkpointing=False, layers=LAYERS))
    assert enough < 1.03 * in_use
    assert plan_of(4, "method.args.gradient_checkpointing=false").memory[0].scattered_gb == 0


PAGES = "user_env.PYTORCH_ALLOC_CONF=expandable_segments:True"
EXPANDABLE = "user_env.PYTORCH_CUDA_ALLOC_CONF='expandable_segments: True'"


@pytest.mark.parametrize(
    ("rows", "given", "warned"),
    [
        (32, (), False),
        (64, (), True),
        (64, ("user_env.PYTORCH_ALLOC_CONF=max_split_size_mb:512",), True),
        (64, (EXPANDABLE,), False),
        (64, (EXPANDABLE, "user_env.PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8"), True),
        (80, (EXPANDABLE, "hardware=mi300x"), True),
        (64, ("hardware=cpu",), False),
    ],
)
def test_the_plan_warns_where_pieces_may_not_leave_enough(rows, given, warned):
    plan = plan_of(rows, *given)
    said = [warning for warning in plan.warnings if "in pieces" in warning]
    assert len(said) == warned
    size = plan.config.method.args["per_device_train_batch_size"]
    cure = "" if "hardware=mi300x" in given else f"{PAGES}, or "
    assert all(
        one.endswith(f"Use: {cure}a smaller method.args.per_device_train_batch_size (now {size}).")
        for one in said
    )


@pytest.mark.parametrize(
    ("total", "scattered", "overrides", "said"),
    [
        (80.0, 30.0, SFT, f"Use: {PAGES}, or a smaller"),
        (96.0, 30.0, SFT, f"Use: {PAGES}, and a smaller"),
        (96.0, 0.0, SFT, "Use: a smaller"),
        (80.0, 30.0, ["method=grpo", "topology=colocate", "model=qwen3_4b"], "Use: a smaller"),
        (80.0, 30.0, ["method=grpo", "topology=split", "model=qwen3_4b"], "Use: a smaller"),
        (80.0, 30.0, [*SFT, "hardware=mi300x"], "Use: a smaller"),
    ],
    ids=["pieces alone", "little room besides", "little room alone", "colocate", "split", "AMD"],
)
def test_pages_are_named_where_they_help(total, scattered, overrides, said):
    entry = Memory("trainers", 0, {"weights": total}, 100.0, scattered_gb=scattered)
    (warning,) = margin.warnings(prepare(composed("hardware=h200", *overrides))[0], [entry])
    assert said in warning


def test_a_search_names_a_batch_that_surely_fits():
    overrides = [*SFT, "hardware=h200"]
    _, finding = fit.search(
        composed(*overrides, "mode=plan", "find=largest_batch"), Request(overrides), host_with(8)
    )
    roomy = re.search(r"with more room: \S+=(\d+)", finding["said"][1])
    assert roomy
    Allocator(H200).replay(events("qwen3_4b", "autocast", int(roomy[1])))


def test_a_search_names_one_where_a_server_fills_its_gpu_beside():
    overrides = ["hardware=mi300x", "method=grpo", "model=qwen3_4b"]
    _, finding = fit.search(
        composed(*overrides, "mode=plan", "find=largest_batch"), Request(overrides), host_with(8)
    )
    assert "with more room" in finding["said"][1]


def test_what_may_not_fit_is_told_before_what_is_fuller_and_does():
    full, in_pieces = (
        Memory("a", 0, {"weights": 90.0}, 100.0),
        Memory("b", 1, {"weights": 80.0}, 100.0, scattered_gb=30.0),
    )
    assert margin.tightest([full, in_pieces]) is in_pieces
    assert (
        margin.tightest([full, Memory("c", 2, {"weights": 101.0}, 100.0), in_pieces]).process == "c"
    )
