"""Test that changes and search results fit, and that the next larger batch does not."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from launch import run
from launch.config.choose import choose
from launch.config.request import Request
from launch.core.errors import HostError, UserError
from launch.estimate import batch_counts, margin
from launch.estimate.speed import estimate_speed
from launch.plan.planning import make_plan, prepare
from launch.plan.predictions import approximate
from launch.search import fit, remedies
from tests.conftest import composed, host_with

TIGHT = {  # commands that do not fit, and the start of an override among the changes
    "batch": (
        "hardware=h200 model=qwen3_4b method=sft topology=single "
        "method.args.per_device_train_batch_size=512",
        fit.BATCH,
    ),
    "checkpointing": (
        "hardware=h200 model=qwen3_4b method=sft topology=single "
        "method.args.gradient_checkpointing=false method.args.max_length=8192",
        "method.args.gradient_checkpointing=true",
    ),
    "sharding": ("hardware=mi210 model=qwen3_4b method=sft topology=ddp", "topology=fsdp"),
    "adapter": ("hardware=rx7900xtx model=qwen3_4b method=sft", "adapter=lora"),
    "split": (
        "hardware=mi210 model=qwen3_4b method=grpo topology=split topology.num_gpus=4 "
        "topology.strategy=ddp",
        "topology.strategy=fsdp",
    ),
    "offload": (
        "hardware=mi210 model=qwen3_14b method=sft topology=zero3 topology.num_gpus=4",
        "topology.zero.offload_p",
    ),
    "sleep": (
        "hardware=h200 model=qwen3_8b method=grpo topology=colocate",
        "method.args.vllm_enable_sleep_mode=true",
    ),
    "turns": (
        "hardware=h200 hardware.gpus_per_node=1 model=qwen3_8b method=grpo topology=split",
        "topology=colocate",
    ),
    "4 bits": ("hardware=mi210 model=qwen3_32b method=sft topology=single", "precision=nf4"),
    "server": (
        "hardware=mi210 model=qwen3_32b method=grpo topology=split adapter=qlora precision=nf4",
        "topology.server_tensor_parallel=2",
    ),
    "server's cache": (
        "hardware=mi300x model=qwen3_4b method=grpo topology=split topology.server_cache_gb=400",
        "topology.server_cache_gb=null",
    ),
    "vllm": (
        "hardware=rx7900xtx model=qwen3_8b method=evaluate method.args.engine=vllm",
        "topology.server_max_length=2048",
    ),
    "half of an evaluation's batch": (
        "hardware=mi50_16gb method=evaluate model=qwen3_4b precision=fp16 precision.weights=fp16",
        "method.args.batch_size=32",
    ),
    "70B on one GPU": (
        "hardware=mi300x model=llama3_1_70b topology=single method=sample method.args.engine=vllm",
        "topology.server_memory_share=0.95",
    ),
    "8-bit moments": (
        "hardware=h100 hardware.gpus_per_node=1 model=qwen3_4b method=dpo topology=single",
        "method.args.optim=adamw_8bit",
    ),
    "16-bit weights": (
        "hardware=mi50 model=qwen3_8b adapter=lora precision=fp16",
        "precision.weights=fp16",
    ),
    "16-bit weights on a GPU that starts in fp32": (
        "hardware=mi50 model=qwen3_8b adapter=lora",
        "precision=fp16",
    ),
    "16-bit weights with an adapter": ("hardware=mi50 model=qwen3_8b", "precision.weights=fp16"),
    "two at once": ("hardware=rx7900xtx model=qwen3_8b method=sft", "precision.weights=bf16"),
}


def tight(name):
    return TIGHT[name][0].split()


def plan_of(overrides):
    config, _ = prepare(composed(*overrides))
    return make_plan(config, host_with(8), Path("/runs/x/1"), request=Request(overrides))


def changes(overrides):
    plan = plan_of(overrides)
    return fit.changes(plan.config, Request(plan.overrides), host_with(8))


def search(*overrides):
    """Search with the overrides, of which the last is find=... ."""
    return fit.search(composed(*overrides, "mode=plan"), Request(overrides[:-1]), host_with(8))


@pytest.mark.parametrize(("ram_gb", "fits"), [(300, True), (120, False), (None, True)])
def test_offload_needs_memory_of_this_machine(tmp_path, ram_gb, fits):
    """FSDP of 14B in fp32 offloads 16 bytes per weight: 236 GB."""
    (tmp_path / "proc").mkdir()
    if ram_gb:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {ram_gb * 10**9 // 1024} kB\n")
    host = dataclasses.replace(host_with(4, "gfx90a"), sysroot=str(tmp_path))
    words = "hardware=mi210 model=qwen3_14b method=sft topology=fsdp topology.num_gpus=4".split()
    command = [*words, "topology.fsdp.cpu_offload=true"]
    plan = make_plan(prepare(composed(*command))[0], host, Path("/runs/x/1"), (), Request(command))
    entries = {entry.process: entry for entry in plan.memory}
    assert ("host" in entries) == (ram_gb is not None)
    assert any("236 GB" in warning for warning in plan.warnings) == (ram_gb is None)
    if ram_gb:
        assert entries["host"].total_gb == pytest.approx(16 * 14.768, rel=0.01)
        assert entries["host"].capacity_gb == pytest.approx(ram_gb)
        assert entries["host"].fits == fits
    assert bool(fit.shortage(plan)) == (not fits)
    smaller = prepare(composed(*words))[0]
    offers = fit.changes(smaller, Request(words), host)
    offered = {override for offer in offers for override in offer.overrides}
    assert (command[-1] in offered) == fits


@pytest.mark.parametrize("name", TIGHT)
def test_each_change_fits(name):
    overrides, expected = tight(name), TIGHT[name][1]
    plan = plan_of(overrides)
    assert not all(m.fits for m in plan.memory)
    results = changes(overrides)
    assert 1 <= len(results) <= fit.MAX_CHANGES
    assert any(o.startswith(expected) for change in results for o in change.overrides)
    for change in results:
        assert all(m.fits for m in plan_of([*overrides, *change.overrides]).memory)


@pytest.mark.parametrize(
    ("loss", "message"), [("dapo", "same results"), ("bnpo", "averages over fewer tokens")]
)
def test_grpo_generates_as_much_with_a_smaller_batch(loss, message):
    overrides = ["hardware=h200", "model=qwen3_4b", "method=grpo", "topology=single"]
    overrides += [f"{fit.BATCH}=256", f"method.args.loss_type={loss}"]
    overrides += ["method.args.steps_per_generation=2"]
    change = changes(overrides)[0]
    after = plan_of([*overrides, *change.overrides]).config
    assert (
        batch_counts.generation_batch(after)
        == batch_counts.generation_batch(plan_of(overrides).config)
        == 512
    )
    assert change.cost == message


def test_changes_for_a_server_come_before_those_for_trainers_that_fit():
    """The trainers have no margin, before as after."""
    grpo = ["hardware=mi300x", "method=grpo", "model=llama3_1_70b"]
    plan = plan_of(grpo)
    assert {m.process for m in plan.memory if not m.fits} == {"server"}
    first, *_ = changes(grpo)
    assert first.overrides == ["topology.server_max_length=2048"]


@pytest.mark.parametrize("override", [
    "adapter=lora",
    "method.args.precompute_ref_log_probs=true",
    "method.args.sync_ref_model=true",
])  # fmt: skip
def test_only_a_constant_reference_is_precomputed(override):
    large = ["hardware=mi50", "model=llama3_1_70b", "topology=single", "precision=fp32"]
    config = composed(*large, "method=dpo", override)
    offered = [change for changes, _ in remedies.remedies(config) for change in changes]
    assert "method.args.precompute_ref_log_probs=true" not in offered
    assert "method.args.optim=adamw_8bit" not in offered, "bitsandbytes serves no MI50"


@pytest.mark.parametrize(("overrides", "change"), [
    ("hardware=mi300x model=llama3_1_70b", "topology.server_memory_share=0.95"),
    ("hardware=mi210 model=llama3_1_70b", "topology.server_tensor_parallel=4"),
    ("hardware=rx7900xtx model=qwen3_8b", "topology.server_max_length=2048"),
])  # fmt: skip
def test_a_service_that_does_not_fit_has_changes(launch, overrides, change):
    done = launch("method=serve", *overrides.split(), "mode=plan")
    assert any(line.split()[:1] == [change] for line in done.out.splitlines()), done.out


def test_changes_override_the_command():
    overrides = ["hardware=rx7900xtx", "model=qwen3_8b", "method=sft", "topology=single"]
    overrides += ["adapter=none", "precision.weights=fp32", "adapter=none"]
    overrides += ["++method.args.max_length=2048", "~method.args.gradient_accumulation_steps"]
    for change in changes(overrides):
        after = plan_of([*overrides, *change.overrides])
        assert all(m.fits for m in after.memory)
        assert (after.config.adapter.name == "lora") == ("adapter=lora" in change.overrides)


def test_a_largest_batch_divides_the_effective_one(capsys):
    overrides = ["hardware=h200", "model=qwen3_4b", "topology=ddp", "effective_batch=768"]
    results, finding = search(*overrides, "find=largest_batch")
    size = int(results[-1].partition("=")[2])
    assert (96 % size, finding["override"]) == (0, f"{fit.BATCH}={size}")
    assert "find=largest_batch" in capsys.readouterr().err  # it takes seconds


@pytest.mark.parametrize("overrides", [
    ["hardware=h200", "model=qwen3_4b", "method=sft", "topology=single"],
    ["hardware=mi300x", "model=qwen3_4b", "method=grpo"],
])  # fmt: skip
def test_the_largest_batch_fits_with_margin_and_the_next_does_not(overrides):
    results, finding = search(*overrides, "find=largest_batch")
    assert results[-1] == finding["override"]
    size = int(results[-1].partition("=")[2])
    assert all(m.fits and not margin.close(m) for m in plan_of(results).memory)
    unit = next(
        b
        for b in range(1, 65)
        if fit._try_tightest(Request([*overrides, f"{fit.BATCH}={b}"]), host_with(8))
    )
    larger = plan_of([*overrides, f"{fit.BATCH}={size + unit}"]).memory
    assert any(margin.close(m) or not m.fits for m in larger)


@pytest.mark.parametrize(("overrides", "is_slower"), [
    ("model=qwen3_8b topology=single adapter=lora", True),  # recomputes activations
    ("model=qwen3_0_6b topology=single", False),
])  # fmt: skip
def test_a_largest_batch_that_is_slower_than_the_default_one_says_so(overrides, is_slower):
    command = ["hardware=mi210", "method=sft", *overrides.split()]
    results, finding = search(*command, "find=largest_batch")
    default, largest = (
        choose(prepare(composed(*request))[0], host_with(8)) for request in (command, results)
    )
    rates = [estimate_speed(config).tokens_per_second for config in (largest, default)]
    assert (rates[0] * 1.02 < rates[1]) is is_slower
    both = [approximate(rate) in finding["said"][0] for rate in rates]
    assert both == [is_slower, is_slower]


@pytest.mark.parametrize(("overrides", "are_close"), [
    ("model=qwen3_32b adapter=qlora precision=nf4", [True]),
    ("model=qwen3_8b", [False, True]),
])  # fmt: skip
def test_offers_with_a_margin_come_first_and_others_say_so(overrides, are_close):
    command = ["hardware=rx7900xtx", "method=sft", *overrides.split()]
    offers = changes(command)
    assert [margin.close(offer.tightest) for offer in offers] == are_close
    needs = [f"{margin.most_gb(offer.tightest):.1f} with the planner's error" for offer in offers]
    assert [most in str(offer) for most, offer in zip(needs, offers, strict=True)] == are_close


def test_an_offered_adapter_has_its_learning_rate():
    command = ["hardware=rx7900xtx", "method=sft", "model=qwen3_8b"]
    for offer in changes(command):
        assert "method.args.learning_rate=0.0002" in offer.overrides
    for offer in changes([*command, "method.args.learning_rate=1e-4"]):
        assert not any("learning_rate" in override for override in offer.overrides)


def test_a_run_that_does_not_fit_is_not_started(capsys, tmp_path):
    command = [*tight("adapter"), "runtime=local", f"run_root={tmp_path}"]
    assert run.main(command) == 3
    message = capsys.readouterr().err
    for words in ("GB on GPU 0", "The run fits with any of these overrides:", "adapter=lora"):
        assert words in message
    assert not list(tmp_path.iterdir())
    assert run.main([*command, "preflight=warn"]) == 3  # then the missing GPU is the error
    message = capsys.readouterr().err
    assert "fits with one of" not in message
    assert "1 amd GPU(s) needed, 0 found" in message


@pytest.mark.parametrize(("override", "extra", "cost"), [
    ("", [], "8 GPUs, so 8 times the sequences per step"),
    ("method.args.gradient_accumulation_steps=16", [f"{fit.ACCUMULATION}=2"], "same results"),
    ("effective_batch=64", [], "same results"),
])  # fmt: skip
def test_the_cost_of_eight_gpus_states_the_batch(override, extra, cost):
    base = "hardware=mi210 hardware.gpus_per_node=8 model=qwen3_8b method=sft topology=single"
    first = changes([*base.split(), *override.split()])[0]
    assert first.overrides == ["topology=fsdp", *extra]
    assert first.cost.startswith(cost)


def test_smallest_hardware_is_the_first_that_fits():
    overrides = ["model=qwen3_8b", "method=sft", "topology=single"]
    overrides += ["hardware.dataloader.num_workers=0"]  # applies to every group
    command, finding = search(*overrides, "find=smallest_hardware")
    # 151 GB; MI300A and Strix Halo share 137 with their host
    assert finding["override"] == "hardware=h200"
    assert command == (*overrides, "hardware=h200")
    assert all(entry.fits for entry in plan_of(command).memory)
    verdicts = [" fits" in line for line in finding["said"][1:]]
    assert verdicts == sorted(verdicts, reverse=True)
    assert not verdicts[-1]


@pytest.mark.parametrize(("overrides", "exit_code", "words"), [
    ("hardware=cpu find=largest_batch", 2, "on a GPU"),
    ("hardware=mi300x method=evaluate find=largest_batch", 2, "for a method that trains"),
    ("hardware=mi300x method=tune/batch find=smallest_hardware", 2, "memory is not planned"),
    ("hardware=mi300x hardware.memory_gb=100 find=smallest_hardware", 2, "^hardware.memory_gb"),
    ("hardware=mi300x smoke=true find=largest_batch", 2, "everything fits"),
    ("hardware=h200 topology=ddp effective_batch=7 find=largest_batch", 2, "multiple of 8"),
    (f"hardware=h200 effective_batch=64 {fit.ACCUMULATION}=2 find=largest_batch", 2, "one of"),
    ("hardware=h200 effective_batch=1000000000000000000 find=largest_batch", 2, "range"),
    ("hardware=mi50 precision=bf16 find=largest_batch", 2, "^precision=bf16: mi50"),
    ("hardware=mi50 model=qwen3_32b topology=single find=largest_batch", 3, "not even 1 sequence"),
    ("hardware=rx7900xtx model=qwen3_8b find=largest_batch", 3, "adapter=qlora precision=nf4"),
    ("hardware=mi50 model=llama3_1_70b precision=nf4 topology=single find=smallest_hardware", 3,
     "rejected: precision=nf4"),
])  # fmt: skip
def test_searches_without_an_answer(overrides, exit_code, words):
    with pytest.raises((UserError, HostError), match=words) as raised:
        search(*overrides.split())
    assert raised.value.exit_code == exit_code


@pytest.mark.parametrize(("overrides", "words"), [
    ("", r"99% of its GPU.*per_device_train_batch_size \(now 4\)"),
    (f"{fit.BATCH}=1", r"a smaller method\.args\.max_length \(now "),
    (f"{fit.BATCH}=1 method.args.max_length=null", "a larger GPU"),
    ("hardware=mi300x", None),
    ("hardware=cpu", None),
])  # fmt: skip
def test_a_plan_that_barely_fits_has_a_warning(overrides, words):
    tight_plan = ["hardware=mi210", "model=qwen3_4b", "topology=single", "method=sft"]
    warnings = plan_of([*tight_plan, *overrides.split()]).warnings
    close = [warning for warning in warnings if "planner's error" in warning]
    assert len(close) == (words is not None)
    assert words is None or re.search(words, close[0])


@pytest.mark.parametrize(("overrides", "first"), [
    (
        "method=grpo topology.strategy=ddp method.args.max_completion_length=4096",
        "topology.strategy=fsdp",
    ),
    ("method=dpo topology=ddp", "topology=fsdp"),
    (f"method=sft topology=single speed=off {fit.BATCH}=104", None),
])  # fmt: skip
def test_tight_ranks_under_ddp_are_told_to_shard(overrides, first):
    command = ["hardware=mi300x", "model=qwen3_8b", *overrides.split()]
    [close] = [line for line in plan_of(command).warnings if "planner's error" in line]
    remedy = close.partition("Use: ")[2].split()[0]
    assert remedy == (first or "a")
    if first:
        assert not any(margin.close(entry) for entry in plan_of([*command, remedy]).memory)


def test_a_plan_shows_the_changes_and_the_finding(capsys):
    assert run.main([*tight("adapter"), "mode=plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [next_run] = [line for line in lines if line.startswith("Next")]
    command = Request(shlex.split(next_run.partition(": ")[2])[2:])
    assert command == (*tight("adapter"), *command[len(tight("adapter")) :])
    assert fit._fitting(command, host_with(8))
    largest = ["hardware=h200", "model=qwen3_4b", "mode=plan", "find=largest_batch"]
    assert run.main([*largest, "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"]["find"] == "largest_batch"
    assert run.main([*largest[:2], largest[3]]) == 2  # a search starts no run
    assert "planning" not in capsys.readouterr().err
    assert run.main(["experiment=quickstart", *largest[2:]]) == 2
    assert "phase sft: find" in capsys.readouterr().err
