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
    ("sft", "max_length=16k", "Use: method.args.max_length=16384."),
    ("sft", "max_length='1,024'", "Use: method.args.max_length=1024."),
    ("sft", "max_steps=16k", "Use: method.args.max_steps=16000."),
    ("sft", "max_steps=1e3", "Use: method.args.max_steps=1000."),
    ("sft", "max_steps=1.5", "1.5: float, and trl.SFTConfig takes int."),
    ("sft", "learning_rate='1e-4'", "Use: method.args.learning_rate=0.0001."),
    ("sft", "learning_rate=fast", "takes float."),
    ("sft", "packing=no", "Use: method.args.packing=false."),
    ("sft", "packing=1", "Use: method.args.packing=true."),
    ("sft", "save_strategy=false", 'Use: method.args.save_strategy="no".'),
    ("grpo", "scale_rewards=false", "Use: method.args.scale_rewards=none."),
    ("sft", "max_steps=true", "True: bool, and trl.SFTConfig takes int."),
    ("sft", "lr_scheduler_type=null", "Use: method.args.lr_scheduler_type=linear."),
    ("dpo", "loss_type='sigmoid, sft'", "Use: method.args.loss_type=[sigmoid,sft]."),
    ("grpo", "loss_type=[dapo]", "Use: method.args.loss_type=dapo."),
    ("grpo", "loss_type=[dapo,grpo]", "takes str."),
    ("bench/gemm", "paddings=8", "Use: method.args.paddings=[8]."),
    ("bench/gemm", "paddings=[-4]", "paddings=[-4]: at least 0."),
    ("bench/gemm", "paddings=[4.0]", "float in a list of int."),
    ("bench/dataloader", "warmup=0", "warmup=0: at least 1."),
    ("tune/batch", "rows=all", "It takes full, data."),
])  # fmt: skip
def test_hint(method, override, hint):
    config = composed("hardware=h200", f"method={method}", f"++method.args.{override}")
    with pytest.raises(UserError) as raised:
        trainer_args.check(config)
    assert str(raised.value).endswith(hint)


@pytest.mark.parametrize("number", ["9" * 500, "1e999", "1,00", ""])
def test_a_malformed_number_has_no_hint(number):
    assert near_names.value_meant("max_steps", number, {"types": ["int"], "default": -1}) == ""


def test_hints_exist():
    """A method has each argument, the lock each word."""
    arguments = trainer_args.lock()["arguments"]
    assert set(near_names.ARGUMENTS.values()) <= set().union(*arguments.values())
    for name, words in near_names.WORDS.items():
        assert set(words.values()) <= set(arguments["trl.SFTConfig"][name]["names"])
