"""Test hints for wrong arguments and values."""

from __future__ import annotations

import pytest

from launch.core import near_names
from launch.core.errors import UserError
from launch.schema import trainer_args
from tests.conftest import composed


@pytest.mark.parametrize(("method", "override", "hint"), [
    ("sft", "lr=1e-4", "Did you mean learning_rate?"),
    ("grpo", "max_new_tokens=4", "Did you mean max_completion_length?"),
    ("sft", "attn_implementation=sdpa", "Use: hardware.attention=sdpa, or another kernel."),
    ("sft", "lerning_rate=1",
     "Did you mean learning_rate, logging_strategy, train_sampling_strategy?"),
    ("sft", "max_steps=16k", "this is str, but trl.SFTConfig accepts int."),
    ("sft", "learning_rate=fast", "accepts float."),
    ("sft", "max_steps=true", "True: this is bool, but trl.SFTConfig accepts int."),
    ("grpo", "loss_type=[dapo,grpo]", "accepts str."),
    ("bench/gemm", "paddings=[-4]", "paddings=[-4]: must be at least 0."),
    ("bench/gemm", "paddings=[4.0]", "contains float, but entries must be int."),
    ("bench/dataloader", "warmup=0", "warmup=0: must be at least 1."),
    ("tune/batch", "rows=all", "Use one of full, data."),
])  # fmt: skip
def test_hint(method, override, hint):
    config = composed("hardware=h200", f"method={method}", f"++method.args.{override}")
    with pytest.raises(UserError) as raised:
        trainer_args.check(config)
    assert hint in str(raised.value)


def test_suggested_names_exist():
    """Some class has each suggested argument, and SFTConfig accepts each suggested word."""
    arguments = trainer_args.lock()["arguments"]
    assert set(near_names.names("arguments").values()) <= set().union(*arguments.values())
    for name, words in near_names.names("words").items():
        assert set(words.values()) <= set(arguments["trl.SFTConfig"][name]["names"])


def test_columns_with_common_names():
    fields = ("question", "solution")
    both = "data.columns.prompt=question data.columns.answer=solution"
    assert near_names.columns_hint(fields, ("prompt", "answer")) == both
    assert near_names.columns_hint(fields, ("prompt", "score")) is None
