"""effective_batch: the accumulation that follows from it, and what is said where none does."""

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


def test_the_accumulation_follows():
    config, warnings = prepare(composed(*EIGHT, "effective_batch=128"))
    assert config.method.args["gradient_accumulation_steps"] == 4
    assert batch_counts.batch(config).sequences == 128
    assert not [line for line in warnings if "effective_batch" in line]


def test_batch_and_accumulation_of_one_command_line_contradict(launch):
    overrides = [*EIGHT, "effective_batch=64", "mode=plan"]
    two, four = (f"method.args.gradient_accumulation_steps={n}" for n in (2, 4))
    for more in ([], ["smoke=true"], ["phases=[{name: one}]"]):
        done = launch(*overrides, four, *more)
        assert done.code == 2
        assert "accumulates 2; or effective_batch=128." in done.err
    assert launch(*overrides, two).code == 0
    of_a_phase = f"phases=[{{name: one, overrides: ['{four}']}}]"
    assert "gradient_accumulation_steps=2, in place of 4." in launch(*overrides, of_a_phase).out
    raft = [*EIGHT[:3], "method=raft", "model.init=pretrained", "method.args.cycles=1"]
    raft += ["method.args.train.per_device_train_batch_size=4", *overrides[4:]]
    for accumulation, code in ((2, 0), (4, 2)):
        argument = f"method.args.train.gradient_accumulation_steps={accumulation}"
        assert launch(*raft, argument).code == code


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["effective_batch=100"],
            "8 rank(s) x 4 sequences: it is not a multiple of 32. Use: effective_batch=96.",
        ),
        (
            ["effective_batch=24"],
            "Use: method.args.per_device_train_batch_size=1 or "
            "method.args.per_device_train_batch_size=3 or effective_",
        ),
        (["effective_batch=-3"], "effective_batch=-3: out of range. Use: at least 1"),
        (
            ["method=evaluate", "topology=single", "effective_batch=8"],
            "evaluate: it takes no optimizer steps",
        ),
        (
            ["effective_batch=8", "method.args.gradient_accumulation_steps=four"],
            "gradient_accumulation_steps='four': str",
        ),
    ],
)
def test_what_does_not_divide(overrides, said):
    with pytest.raises(UserError) as raised:
        prepare(composed(*EIGHT[: 3 if "method=evaluate" in overrides else 4], *overrides))
    assert said in str(raised.value)


def test_the_remedy_of_a_group_that_an_effective_batch_cuts_is_taken():
    given = ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.num_gpus=4"]
    given += ["effective_batch=96", "method.args.num_generations=5"]
    with pytest.raises(UserError, match="method.args.num_generations=5 does not divide") as raised:
        prepare(composed(*given))
    remedies = re.findall(r"[\w.]+=\d+", str(raised.value).partition("Use: ")[2])
    assert remedies
    for remedy in remedies:
        prepare(composed(*given, remedy))


@pytest.mark.parametrize(("overrides", "tokens"), [
    (["topology=split"], 512 + 256),
    (["topology=split", "topology.server_max_length=600"], 600),
    (["topology=colocate", "method.args.vllm_max_model_length=640"], 640),
    (["topology=single"], 512 + 256),
])  # fmt: skip
def test_what_generates_bounds_a_row(overrides, tokens):
    """A 76M model with 64 tokens at most was planned with 264.

    That was 160 GB where 15 were measured, and a run that fits was rejected.
    """
    given = (
        "hardware=mi300x model=qwen3_4b method=grpo method.args.max_completion_length=512".split()
    )
    assert batch_counts.batch(composed(*given, *overrides)).sequence == tokens
