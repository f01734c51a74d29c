"""Test the balance of a GRPO step under topology=split, and topology.servers=auto."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from launch import run
from launch.config.choose import choose
from launch.config.identity import composition_hash
from launch.core.errors import UserError
from launch.estimate import margin
from launch.estimate.batch_counts import batch
from launch.estimate.speed import estimate_speed
from launch.plan.balance import KEY, balance, with_servers
from launch.plan.planning import prepare
from tests.conftest import composed, host_with

MODEL = ["hardware=h100", "model=qwen3_1_7b", "runtime=local", "topology.server_max_length=1024"]
SPLIT = [*MODEL, "method=grpo", "topology=split"]
HOST = host_with(8)


def chosen(*overrides: str):
    return choose(prepare(composed(*SPLIT, *overrides))[0], HOST)


def rates(sequences: int) -> dict[int, float]:
    """Return tokens per second by the number of servers, for those that can share the sequences."""
    plans = {}
    for servers in range(1, 8):
        with suppress(UserError):
            plans[servers] = chosen(f"{KEY}={servers}", f"effective_batch={sequences}")
    return {n: estimate_speed(plan).tokens_per_second or 0.0 for n, plan in plans.items()}


def test_halves_add_up_to_the_step():
    for overlap in ("false", "true"):
        config = chosen("topology.num_gpus=2", f"topology.overlap={overlap}")
        split, step_s = balance(config, HOST), estimate_speed(config).step_s
        halves = (split.generation_s, split.training_s)
        assert step_s == pytest.approx(max(halves) if overlap == "true" else sum(halves))
        assert split.bound == "generation"
        assert (split.servers, split.gain) == (1, 1.0)  # of two GPUs there is no other split


def test_fastest_split_and_its_gain():
    config = chosen()
    split, before = balance(config, HOST), estimate_speed(config).tokens_per_second
    by_servers = rates(split.sequences)
    assert split.servers == max(by_servers, key=by_servers.get) > 1
    assert split.gain == pytest.approx(max(by_servers.values()) / before, abs=0.01)
    assert (batch(config).sequences, split.sequences) == (56, 64)


def test_a_fixed_accumulation_stays():
    for servers, sequences in ((1, 56 * 4), ("auto", None)):
        config = chosen(f"{KEY}={servers}", "method.args.gradient_accumulation_steps=4")
        split = balance(config, HOST)
        assert sequences in (None, batch(config).sequences)
        assert split.sequences == (8 - split.servers) * 8 * 4


def test_splits_that_do_not_fit_are_not_offered(monkeypatch):
    config = chosen()
    fastest = balance(config, HOST).servers
    monkeypatch.setattr(
        margin, "fits_with_margin", lambda split, host: split.topology.servers != fastest
    )
    other = balance(config, HOST)
    by_servers = {n: rate for n, rate in rates(other.sequences).items() if n != fastest}
    assert other.servers == max(by_servers, key=by_servers.get)
    monkeypatch.setattr(margin, "fits_with_margin", lambda split, host: False)
    assert balance(config, HOST).gain > 1.0  # the current split has no margin either
    monkeypatch.setattr(margin, "fits", lambda split, host: False)
    assert (balance(config, HOST).servers, balance(config, HOST).gain) == (1, 1.0)


def test_auto_is_the_fastest_number_of_servers():
    config, _ = prepare(composed(*SPLIT, "topology.servers=auto"))
    assert config.topology.servers == balance(chosen(), HOST).servers
    assert balance(choose(config, HOST), HOST).gain == 1.0
    same = [f"{KEY}={config.topology.servers}", f"effective_batch={batch(config).sequences}"]
    fixed, _ = prepare(composed(*SPLIT, *same))
    assert composition_hash(config) == composition_hash(fixed)
    assert prepare(config)[0].topology.servers == config.topology.servers


@pytest.mark.parametrize("overrides", [
    ["effective_batch=256", "topology.strategy=ddp"],
    ["effective_batch=128", "topology.strategy=ddp"],
    ["effective_batch=128", "topology.strategy=fsdp"],
])  # fmt: skip
def test_auto_takes_the_fewest_seconds_per_sequence(overrides):
    """With several trainers, 8B under DDP fits an MI300X without the planner's margin."""
    command = ["hardware=mi300x", "model=qwen3_8b", "method=grpo", "runtime=local", *overrides]
    command.append("method.args.max_completion_length=4096")
    plans = {}
    for servers in range(1, 8):
        with suppress(UserError):  # the trainers cannot share the effective batch
            plan = choose(prepare(composed(*command, f"topology.servers={servers}"))[0], HOST)
            plans[servers] = estimate_speed(plan).step_s / batch(plan).sequences, plan
    best = min(plans, key=lambda servers: plans[servers][0])
    auto = choose(prepare(composed(*command, "topology.servers=auto"))[0], HOST)
    assert auto.topology.servers == best != max(plans)
    assert balance(plans[min(plans)][1], HOST).servers == best
    assert balance(auto, HOST).gain == 1.0


@pytest.mark.parametrize(("overrides", "message"), [
    (["topology.servers=many"], "whole number, or auto"),
    (["topology.servers=1.5"], "whole number, or auto"),
    (["topology=ddp", "topology.servers=auto"], "topology=split"),
])  # fmt: skip
def test_invalid_numbers_of_servers_are_rejected(overrides, message):
    with pytest.raises(UserError, match=message) as raised:
        with_servers(composed(*SPLIT, *overrides))
    assert raised.value.exit_code == 2


def test_a_plan_shows_the_balance(capsys):
    assert run.main([*SPLIT, "mode=plan", "format=json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    halves = plan["balance"]["generation_s"], plan["balance"]["training_s"]
    assert plan["speed"]["step_s"] == pytest.approx(max(halves))  # they overlap by default
    assert run.main([*SPLIT, "mode=plan"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"topology.servers={plan['balance']['servers']}" in page
    assert plan["faster"][0]["gain"] == plan["balance"]["gain"]
