"""Test hints at the argument or value that a wrong one stands for."""

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
    ("sft", "max_steps=16k", "str, and trl.SFTConfig takes int."),
    ("sft", "learning_rate=fast", "takes float."),
    ("sft", "max_steps=true", "True: bool, and trl.SFTConfig takes int."),
    ("grpo", "loss_type=[dapo,grpo]", "takes str."),
    ("bench/gemm", "paddings=[-4]", "paddings=[-4]: at least 0."),
    ("bench/gemm", "paddings=[4.0]", "float in a list of int."),
    ("bench/dataloader", "warmup=0", "warmup=0: at least 1."),
    ("tune/batch", "rows=all", "It takes full, data."),
])  # fmt: skip
def test_hint(method, override, hint):
    config = composed("hardware=h200", f"method={method}", f"++method.args.{override}")
    with pytest.raises(UserError) as raised:
        trainer_args.check(config)
    assert hint in str(raised.value)


def test_hints_exist():
    """A method has each argument, the lock each word."""
    arguments = trainer_args.lock()["arguments"]
    assert set(near_names.names("arguments").values()) <= set().union(*arguments.values())
    for name, words in near_names.names("words").items():
        assert set(words.values()) <= set(arguments["trl.SFTConfig"][name]["names"])
