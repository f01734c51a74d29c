"""Test speed=auto: the choices, the settings that it must not change, and resumed runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launch.config import choose
from launch.config.compose import leaf
from launch.config.identity import composition_hash
from launch.config.request import Request
from launch.estimate import margin
from launch.estimate.speed import estimate_speed
from launch.plan import rundir
from launch.plan.balance import balance
from launch.plan.planning import make_plan, prepare, with_choices
from launch.schema import trainer_args
from launch.schema.enums import Rows
from launch.search.faster import cheaper, faster
from tests.conftest import composed, host_with, leave_record

HOST = host_with(8)
H100 = ["hardware=h100", "topology=single", "model=qwen3_4b", "method.args.max_length=4096"]
SMALL = ["hardware=h100", "topology=single", "model=qwen3_0_6b", "method.args.max_length=2048"]
DPO = ["hardware=h100", "topology=single", "model=qwen3_1_7b", "method=dpo"]
GRPO = ["hardware=h100", "topology=split", "topology.num_gpus=2", "model=qwen3_1_7b", "method=grpo"]
GRPO += ["effective_batch=96"]
BATCH, ACCUMULATION, CHECKPOINTING = choose.BATCH, choose.ACCUMULATION, choose.CHECKPOINTING
RUN = Path("/runs/x/1")


def chosen(*overrides: str, host=HOST):
    return choose.choose(prepare(composed(*overrides))[0], host)


def offers_of(config):
    return faster(config, HOST, balance(config, HOST))


def choices(*overrides: str, host=HOST) -> dict[str, object]:
    """Return the choices as key -> value."""
    return {choice.key: choice.value for choice in chosen(*overrides, host=host).chosen}


@pytest.mark.parametrize(
    "override",
    [f"{BATCH}=2", f"{CHECKPOINTING}=true", "step.compile=false", "step.rows=grouped",
     "hardware.dataloader.num_workers=3"],
)  # fmt: skip
def test_user_values_stay(override):
    key, _, value = override.partition("=")
    config = chosen(*SMALL, override)
    assert key not in {choice.key for choice in config.chosen}
    actual = leaf(config, key)
    assert str(actual.name if isinstance(actual, Rows) else actual).lower() == value
    assert CHECKPOINTING in choices(*SMALL)
    assert CHECKPOINTING not in choices(*SMALL, f"speed_keeps=[{CHECKPOINTING}]")


@pytest.mark.parametrize(("overrides", "compiles"), [
    ([*SMALL], True),
    ([*SMALL, "step.compile=null"], True),
    ([*SMALL, "speed=off"], False),
    ([*SMALL, "method.args.use_liger_kernel=true"], False),
    ([*SMALL, "smoke=true"], False),
    ([*SMALL, "method.args.max_steps=5"], False),
    (["hardware=mi50", "model=qwen3_0_6b"], False),
    (["hardware=h100", "model=qwen3_8b", "topology=zero3"], False),
    ([*SMALL, "adapter=qlora", "precision=nf4"], False),
    (["hardware=h100", "topology=single", "model=qwen3_0_6b", "method=grpo"], False),
    (GRPO, True),
    ([*H100, "precision=fp8", "speed=off"], True),
    ([*H100, "precision=fp8", "method.args.max_steps=1"], True),
    ([*H100, "precision=fp8", "method.args.torch_compile=true"], False),
])  # fmt: skip
def test_choice_of_compile(overrides, compiles):
    config = chosen(*overrides)
    assert config.step.compile is compiles
    assert compiles in [choice.value for choice in config.chosen if choice.key == "step.compile"]


@pytest.mark.parametrize(("overrides", "rows"), [
    (SMALL, "packed"),
    ([*SMALL, "hardware.packed_attention=null"], "grouped"),
    ([*SMALL, "method.args.torch_compile=true"], "grouped"),
    (["hardware=cpu"], "grouped"),
    (DPO, "grouped"),
    ([*DPO, "method.args.loss_type=[sigmoid,sft]"], "padded"),
    (GRPO, "packed"),
    ([*GRPO, "topology=zero3"], "grouped"),
    ([*GRPO, "method.args.cast_lm_head_to_fp32=true"], "grouped"),
    (["hardware=cpu", "method=grpo", "smoke=true"], "packed"),
    ([*SMALL, "method.args.packing=true"], "padded"),
    ([*SMALL, "method.args.neftune_noise_alpha=5"], "padded"),
    ([*SMALL, "adapter=lora", "adapter.dropout=0.05"], "padded"),
    ([*SMALL, "speed=off"], "padded"),
])  # fmt: skip
def test_choice_of_rows(overrides, rows):
    config = chosen(*overrides)
    assert config.step.rows == Rows[rows]
    assert rows in [choice.value for choice in config.chosen]


@pytest.mark.parametrize(("base", "override"), [
    (DPO, "method.args.train_sampling_strategy=group_by_length"),
    (DPO, "method.args.dataloader_drop_last=true"),
    (DPO, "method.args.auto_find_batch_size=true"),
    (DPO, "method.args.max_length=null"),
    (DPO, "method.args.loss_type=[aot]"),
    (DPO, "data.num_train=8001"),  # the last micro-batch would be smaller
    (GRPO, "method.args.loss_type=bnpo"),
    (GRPO, "method.args.top_entropy_quantile=0.2"),
    (GRPO, "method.args.steps_per_generation=12"),
])  # fmt: skip
def test_settings_that_fix_the_micro_batch(base, override):
    args = chosen(*base).method.args
    sequences = args["per_device_train_batch_size"] * args["gradient_accumulation_steps"]
    assert sequences == (16 if base is DPO else 96)
    assert BATCH in choices(*base)
    assert BATCH not in choices(*base, override)


def test_held_out_batches_do_not_grow_with_the_micro_batch():
    """Held-out metrics are means over batches."""
    selected = [*DPO, "method.selection.metric=eval_loss"]
    composed_size = prepare(composed(*selected))[0].method.args["per_device_train_batch_size"]
    config = chosen(*selected)
    assert config.method.args["per_device_train_batch_size"] > composed_size
    assert trainer_args.eval_batch_size(config) == composed_size
    smaller = choose.with_value(config, BATCH, 1)  # more rows may not fit
    assert trainer_args.eval_batch_size(smaller) == 1
    own = choose.with_value(config, "method.args.per_device_eval_batch_size", 99)
    assert trainer_args.eval_batch_size(own) == 99


def test_checkpointing_depends_on_memory():
    """Recompute no layers, some, or all."""
    none = choices(*H100, "hardware.memory_gb=141")
    some = choices(*H100)
    every = choices(*H100, "hardware.memory_gb=70")
    assert none[CHECKPOINTING] is False
    assert choose.LAYERS not in none
    assert CHECKPOINTING not in some
    assert 0 < some[choose.LAYERS] < 36
    assert CHECKPOINTING not in every
    assert choose.LAYERS not in every


def test_trainers_that_wait_keep_checkpointing():
    """Recomputation is free for seven of eight GPUs, but not for the only trainer of two."""
    eight = ["hardware=mi300x", "method=grpo", "model=qwen3_4b", "effective_batch=56"]
    assert CHECKPOINTING not in choices(*eight)
    assert CHECKPOINTING in choices(*eight, "topology.num_gpus=2")
    assert CHECKPOINTING in choices(*eight, "topology.overlap=false")


@pytest.mark.parametrize("overrides", [SMALL, GRPO, ["hardware=mi300x", "model=qwen3_8b"]])
def test_choices_fit_with_a_margin_and_are_not_slower(overrides):
    config = chosen(*overrides)
    plan = make_plan(config, HOST, RUN)
    assert all(entry.fits and not margin.close(entry) for entry in plan.memory)
    assert plan.speed.tokens_per_second >= plan.plain_speed.tokens_per_second


@pytest.mark.parametrize(("overrides", "is_cautious"), [
    ([], True),
    (["method.args.max_length=512"], False),  # would cost more than a tenth of the speed
])  # fmt: skip
def test_choices_leave_room_for_the_worst_published_run_if_that_costs_little(
    overrides, is_cautious
):
    config = chosen("experiment=mi50_lora", "hardware=mi50_16gb", *overrides)
    [entry] = make_plan(config, HOST, RUN).memory
    assert (not margin.close(margin.at_worst(entry))) == is_cautious


@pytest.mark.parametrize(("cores", "workers"), [(2, 1), (3, 2), (64, None)])
def test_loader_workers_depend_on_cores(cores, workers):
    few = dataclasses.replace(HOST, num_cores=cores)
    on_this_host = ["hardware=mi300x", "model=qwen3_0_6b", "topology=single"]
    assert choices(*on_this_host, host=few).get(choose.WORKERS) == workers
    assert choose.WORKERS not in choices(
        *on_this_host,
        "data.streaming=true",
        "data=hub",
        "data.hub_id=a/b",
        "data.revision=c",
        "method.args.max_steps=9",
        host=few,
    )
    # the hardware file sets 0
    assert choose.WORKERS not in choices("hardware=strix_halo", "model=qwen3_0_6b", host=few)


def test_evaluations_have_no_choices_and_tunings_use_trl_defaults():
    offers = offers_of(chosen(*H100, "speed=off"))
    assert [offer.overrides for offer in offers] == [["speed=auto"]]
    assert chosen("hardware=h100", "method=evaluate", "model=qwen3_0_6b").chosen == []
    assert choices(*SMALL, "method=tune/batch") == {"step.compile": False, "step.rows": "padded"}


def test_choices_do_not_change_the_composition_hash():
    for overrides in (H100, DPO, GRPO):
        before, after = prepare(composed(*overrides))[0], chosen(*overrides)
        assert after.chosen
        assert after != before
        assert composition_hash(after) == composition_hash(before)
        assert choose.without_choices(after) == before
    assert composition_hash(chosen(*SMALL, "speed=off")) != composition_hash(chosen(*SMALL))


def other_planner(*overrides: str):
    """Return the composition of a planner that compiles nothing and checkpoints two layers."""
    config, _ = prepare(composed(*overrides))
    for key, value in (("step.compile", False), ("step.rows", Rows.grouped), (choose.LAYERS, 2)):
        config = choose._with_choice(config, key, value, "of another version")
    return config


def test_a_run_of_another_planner_resumes_with_its_choices(tmp_path):
    first = other_planner(*SMALL, f"run_root={tmp_path}")
    folder = rundir.runs_dir(first) / "20260101-000000-aaaaaa"
    leave_record(folder, first, "interrupted")
    config, _ = prepare(composed(*SMALL, f"run_root={tmp_path}"))
    assert rundir.choose(config) == (folder, True)
    resumed = with_choices(config, HOST, folder)
    assert resumed == first
    # The current planner would choose False.
    assert resumed.method.args["gradient_checkpointing"] is True


def test_on_other_ranks_only_the_micro_batch_changes(tmp_path):
    base = "hardware=mi300x runtime=local model=qwen3_4b topology=ddp effective_batch=64".split()
    first = other_planner(*base, "topology.num_gpus=8")
    leave_record(tmp_path, first, "interrupted")
    moved, _ = prepare(composed(*base, "topology.num_gpus=4", f"resume={tmp_path}"))
    assert rundir.choose(moved) == (tmp_path, True)
    resumed = with_choices(moved, HOST, tmp_path)
    assert resumed.step == first.step
    assert choose.batch(resumed).sequences == choose.batch(first).sequences == 64


@pytest.mark.parametrize(("command", "expected"), [
    (H100, {"precision.weights=bf16", "precision=fp8", "adapter=lora"}),
    (["hardware=mi50", "model=qwen3_1_7b", "adapter=lora"], {"precision=fp16"}),  # no bf16
    ("hardware=mi300x method=grpo model=qwen3_4b".split(),
     {"topology=colocate", "topology.servers=6", "topology.servers=4"}),
    ("hardware=mi300x method=grpo model=qwen3_8b topology.strategy=ddp".split(),  # too tight
     {"topology=colocate", "topology.servers=6"}),
    ("hardware=rx7900xtx method=grpo model=qwen3_0_6b".split(), {"topology=colocate"}),
    ("hardware=mi300x method=grpo model=qwen3_8b topology.num_gpus=1".split(),  # vLLM must sleep
     {"topology=colocate"}),
    ("hardware=mi300x method=grpo model=qwen3_4b topology=colocate".split(),
     {"effective_batch=64"}),
    ("hardware=mi350x method=grpo model=llama3_1_70b adapter=lora".split(),
     {"topology.server_tensor_parallel=4"}),
    ("hardware=mi300x method=grpo model=qwen3_8b topology.num_gpus=4".split(),  # one trainer left
     {"topology.servers=3"}),
    ("hardware=mi300x method=grpo model=qwen3_4b effective_batch=56".split(),
     {"topology.servers=7"}),
    ("hardware=mi300x method=grpo model=qwen3_4b topology=split topology.servers=auto".split(),
     {"topology.servers=4"}),  # a larger step
    ("hardware=h200 method=grpo model=qwen3_1_7b topology.num_gpus=2 effective_batch=96".split(),
     {"topology.overlap=stream"}),
])  # fmt: skip
def test_offers_compose_fit_and_reach_their_gain(command, expected):
    base = chosen(*command)
    offers = offers_of(base)
    assert {offer.overrides[0] for offer in offers} >= expected
    for offer in offers:
        config = chosen(*command, *offer.overrides)
        assert all(entry.fits for entry in make_plan(config, HOST, RUN).memory)
        gain = estimate_speed(config).tokens_per_second / estimate_speed(base).tokens_per_second
        assert gain == pytest.approx(offer.gain, abs=0.006)
        assert offer.price
        before, after = (
            (estimate_speed(c).steps or 1) * choose.batch(c).sequences for c in (base, config)
        )
        assert after == pytest.approx(before, abs=choose.batch(config).sequences / 2)


def split_of(offer) -> tuple[int, int]:
    """Return the servers of an offered split, and its sequences per step."""
    values = dict(override.split("=") for override in offer.overrides)
    return int(values["topology.servers"]), int(values["effective_batch"])


@pytest.mark.parametrize("overrides", [
    "hardware=mi300x model=qwen3_4b", "hardware=mi300x model=qwen3_8b topology.strategy=ddp",
    "hardware=mi300x model=qwen3_8b method.args.max_completion_length=8192",
    "hardware=h100 model=qwen3_1_7b", "hardware=mi325x model=qwen3_14b adapter=lora",
])  # fmt: skip
def test_an_offered_split_leaves_no_faster_one(overrides):
    command = ["method=grpo", "topology=split", *overrides.split()]
    base = chosen(*command)
    same, *others = offers_of(base)
    larger = next(offer for offer in others if "fewer updates" in offer.price)
    assert abs(split_of(same)[1] - choose.batch(base).sequences) <= 8
    for offer in (same, larger):
        after = offers_of(chosen(*command, *offer.overrides))
        kinds = {override.partition("=")[0] for o in after for override in o.overrides}
        assert not kinds & {"topology.servers", "effective_batch"}
    auto = chosen(*command, "topology.servers=auto")
    assert (auto.topology.servers, auto.effective_batch) == split_of(same)


@pytest.mark.parametrize("batch", [[], ["effective_batch=8"]])
def test_only_an_offer_that_says_so_has_far_fewer_updates(batch):
    base = chosen(*"hardware=mi300x model=qwen3_8b method=grpo topology.servers=7".split(), *batch)
    offers = [o for o in offers_of(base) if any("servers=" in word for word in o.overrides)]
    assert ["fewer updates" in offer.price for offer in offers] == [True] * (not batch)


GRPO_OF_4B = ["hardware=mi300x", "model=qwen3_4b", "method=grpo"]
COLOCATED = ["topology=colocate", "topology.num_gpus=1", "effective_batch=56"]
TWO_GPUS = ["topology.num_gpus=2", "effective_batch=56"]


@pytest.mark.parametrize(("overrides", "expected"), [
    ("model=qwen3_4b method.args.max_completion_length=1024", [TWO_GPUS, COLOCATED]),
    ("model=qwen3_8b", [TWO_GPUS, [*COLOCATED, "method.args.vllm_enable_sleep_mode=true"]]),
    ("model=qwen3_8b topology.strategy=fsdp", [TWO_GPUS]),
])  # fmt: skip
def test_the_fastest_and_cheapest_runs_have_the_same_steps_on_fewer_gpus(overrides, expected):
    command = f"hardware=mi300x method=grpo price_per_gpu_hour=2 {overrides}".split()
    base = chosen(*command)
    offers = cheaper(base, Request(command), HOST)
    assert [offer.overrides for offer in offers] == expected
    before = estimate_speed(base)
    for offer in offers:
        config = chosen(*command, *offer.overrides)
        after = estimate_speed(config)
        assert choose.batch(config).sequences == choose.batch(base).sequences
        assert after.steps == before.steps
        assert after.cost < before.cost / 2
        assert after.unit_cost == pytest.approx(offer.unit_cost)
        assert after.tokens_per_second / before.tokens_per_second == pytest.approx(
            offer.gain, abs=0.006
        )
        assert margin.fits_with_margin(config, HOST)


@pytest.mark.parametrize(("overrides", "has_offers"), [
    ("method=grpo", True),
    ("method=grpo topology=colocate topology.num_gpus=8", False),  # no trainer waits
    ("method=sft price_per_gpu_hour=2", False),
])  # fmt: skip
def test_without_a_price_a_cheaper_run_is_offered_if_trainers_wait(overrides, has_offers):
    command = f"hardware=mi300x model=qwen3_4b {overrides}".split()
    assert bool(cheaper(chosen(*command), Request(command), HOST)) == has_offers


@pytest.mark.parametrize(("scaling", "stays"), [
    ([], True), (["method.lr_scaling=sqrt", "method.lr_reference_batch=56"], False),
])  # fmt: skip
def test_a_larger_step_says_whether_the_learning_rate_stays(scaling, stays):
    offers = offers_of(chosen(*GRPO_OF_4B, *scaling))
    [larger] = [offer for offer in offers if "effective_batch=448" in offer.overrides]
    assert ("same learning rate" in larger.price) == stays


@pytest.mark.parametrize(("overrides", "offer"), [
    ([*H100, "method.args.max_steps=5"], "precision=fp8"),  # too short to compile
    ([*H100, "precision=fp32"], "precision=fp16"),  # the GPU has bf16
    (["hardware=mi50", "method=grpo", "topology=single"], "topology=colocate"),  # no vLLM
    (["hardware=h200", "method=grpo", "topology.num_gpus=2", "topology.overlap=true"],
     "topology.overlap=stream"),
    ("hardware=h200 method=grpo model=qwen3_4b topology.num_gpus=2 effective_batch=96 "
     "topology.strategy=ddp".split(), "topology.strategy=fsdp"),
])  # fmt: skip
def test_no_offer_contradicts_the_run(overrides, offer):
    assert offer not in [first for o in offers_of(chosen(*overrides)) for first in o.overrides]
