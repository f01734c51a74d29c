"""Test effective_batch: the accumulation that it implies, and the messages if there is none."""

from __future__ import annotations

import re

import pytest

from launch.core.errors import UserError
from launch.estimate import batch_counts
from launch.plan.planning import prepare
from tests.conftest import composed

EIGHT = [
    "hardware=mi300x",
    "model=qwen3_4b",
    "topology=ddp",
    "method.args.per_device_train_batch_size=4",
]


def test_effective_batch_sets_the_accumulation():
    config, warnings = prepare(composed(*EIGHT, "effective_batch=128"))
    assert config.method.args["gradient_accumulation_steps"] == 4
    assert batch_counts.batch(config).sequences == 128
    assert not [line for line in warnings if "effective_batch" in line]


def test_effective_batch_and_accumulation_contradict(launch):
    overrides = [*EIGHT, "effective_batch=64", "mode=plan"]
    two, four = (f"method.args.gradient_accumulation_steps={n}" for n in (2, 4))
    for more in ([], ["smoke=true"], ["phases=[{name: one}]"]):
        done = launch(*overrides, four, *more)
        assert done.code == 2
        assert "accumulates 2; or effective_batch=128." in done.err
    assert launch(*overrides, two).code == 0
    phases = f"phases=[{{name: one, overrides: ['{four}']}}]"
    assert "gradient_accumulation_steps=2, in place of 4." in launch(*overrides, phases).out
    raft = [*EIGHT[:3], "method=raft", "model.init=pretrained", "method.args.cycles=1"]
    raft += ["method.args.train.per_device_train_batch_size=4", *overrides[4:]]
    for accumulation, code in ((2, 0), (4, 2)):
        argument = f"method.args.train.gradient_accumulation_steps={accumulation}"
        assert launch(*raft, argument).code == code


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["effective_batch=100"],
            "not a multiple of 32 (8 rank(s) x 4 sequences). Use: effective_batch=96.",
        ),
        (
            ["effective_batch=24"],
            "Use: method.args.per_device_train_batch_size=1 or "
            "method.args.per_device_train_batch_size=3 or effective_",
        ),
        (["effective_batch=-3"], "effective_batch=-3: out of range. Use: at least 1"),
        (
            ["method=evaluate", "topology=single", "effective_batch=8"],
            "evaluate: this method has no optimizer steps",
        ),
        (
            ["effective_batch=8", "method.args.gradient_accumulation_steps=four"],
            "gradient_accumulation_steps='four': this is str",
        ),
    ],
)
def test_wrong_effective_batch(overrides, message):
    with pytest.raises(UserError) as raised:
        prepare(composed(*EIGHT[: 3 if "method=evaluate" in overrides else 4], *overrides))
    assert message in str(raised.value)


def test_remedies_for_a_group_size_that_does_not_divide_the_batch():
    overrides = ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.num_gpus=4"]
    overrides += ["effective_batch=96", "method.args.num_generations=5"]
    with pytest.raises(
        UserError, match="method.args.num_generations=5: it does not divide"
    ) as raised:
        prepare(composed(*overrides))
    remedies = re.findall(r"[\w.]+=\d+", str(raised.value).partition("Use: ")[2])
    assert remedies
    for remedy in remedies:
        prepare(composed(*overrides, remedy))


@pytest.mark.parametrize(("overrides", "tokens"), [
    (["topology=split"], 512 + 256),
    (["topology=split", "topology.server_max_length=600"], 600),
    (["topology=colocate", "method.args.vllm_max_model_length=640"], 640),
    (["topology=single"], 512 + 256),
])  # fmt: skip
def test_the_limit_of_vllm_bounds_a_row(overrides, tokens):
    """Without this bound, a 76M model with at most 64 tokens was planned with 264.

    The plan then predicted 160 GB instead of 15 and rejected a run that fits.
    """
    base = "hardware=mi300x model=qwen3_4b method=grpo method.args.max_completion_length=512"
    assert batch_counts.batch(composed(*base.split(), *overrides)).sequence == tokens
