"""Test hints for wrong arguments and values."""

from __future__ import annotations

import shlex

import pytest

from launch.config.wording import groups
from launch.core import near_names
from launch.core.errors import UserError
from launch.schema import trainer_args
from tests.conftest import composed


@pytest.mark.parametrize(("method", "override", "hint"), [
    ("sft", "lr=1e-4", "Did you mean learning_rate?"),
    ("grpo", "max_new_tokens=4", "Did you mean max_completion_length?"),
    ("sft", "attn_implementation=sdpa", "Use: hardware.attention=sdpa, or another kernel."),
    ("evaluate", "max_completion_length=4", "Did you mean max_new_tokens?"),
    ("sft", "chat_template_kwargs={a: 1}", "Use: a field chat_template_kwargs in each row."),
    ("export", "weights=Q4_K_M", "Use: llama-quantize on the model.gguf"),
    ("sft", "lerning_rate=1", "Did you mean learning_rate?"),
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
    """Some class has each suggested argument, and each suggested word is valid."""
    arguments = trainer_args.lock()["arguments"]
    assert set(near_names.names("arguments").values()) <= set().union(*arguments.values())
    for name in ("optim", "lr_scheduler_type"):
        words = near_names.names("words")[name].values()
        assert set(words) <= set(arguments["trl.SFTConfig"][name]["names"])
    assert set(near_names.names("words")["precision"].values()) <= set(groups()["precision"])


@pytest.mark.parametrize(("word", "override"), [
    ("lora_r=8", "adapter=lora adapter.rank=8"),
    ("lora_alpha=8", "adapter=lora adapter.alpha=8"),
    ("load_in_4bit=true", "adapter=qlora precision=nf4"),
    ("val_size=0.1", "data.heldout_fraction=0.1"),
    ("reward=mine.score", "'method.rewards={mine.score: 1.0}'"),
    ("method.rewards=mine.score", "'method.rewards={mine.score: 1.0}'"),
    ("method.rewards=[mine.score, format]", "'method.rewards={mine.score: 1.0, format: 1.0}'"),
    ("model.thinking=true", "method.args.chat_template_kwargs.enable_thinking=true"),
    ("method.args.enable_thinking=true", "method.args.chat_template_kwargs.enable_thinking=true"),
    ("reward_funcs=[accuracy,format]", "'method.rewards={accuracy: 1.0, format: 1.0}'"),
    ("thinking=false", "method.args.chat_template_kwargs.enable_thinking=false"),
    ("train_file=/tmp/a.jsonl", "data=jsonl data.path=/tmp/a.jsonl"),
    ("max_completion_length=4", "method.args.max_completion_length=4"),
    ("max_new_tokens=4", "method.args.max_completion_length=4"),
    ("epochs=2", "method.args.num_train_epochs=2"),
    ("lr=1e-5", "method.args.learning_rate=1e-5"),
])  # fmt: skip
def test_names_of_other_tools(word, override):
    """The message has an override that composes, with the user's value."""
    words = ["hardware=mi300x", "model=qwen3_4b", "method=grpo"]
    with pytest.raises(UserError) as raised:
        trainer_args.check(composed(*words, word))
    assert f"Use: {override}." in str(raised.value)
    trainer_args.check(composed(*words, *shlex.split(override)))


@pytest.mark.parametrize(("word", "shown"), [
    ("val_set_size=500", "Use: data.heldout_fraction=<value>."),
    ("train_file=/tmp/a b.jsonl", "Use: data=jsonl data.path=<value>."),
    ("lora_r=high", "Use: adapter=lora adapter.rank=<value>."),
    ("reward=1.5", "Use: 'method.rewards={<name>: 1.0}'."),
])  # fmt: skip
def test_a_value_of_the_wrong_form_is_not_offered(word, shown):
    with pytest.raises(UserError) as raised:
        composed("method=grpo", word)
    assert shown in str(raised.value)


@pytest.mark.parametrize("word", [
    "use_lora=false", "load_in_4bit=False", "flash_attn=false", "thinking=false", "fail_below=0.9",
])  # fmt: skip
def test_what_is_off_or_not_of_the_method_is_not_offered(word):
    with pytest.raises(UserError) as raised:
        composed("method=sft", word)
    assert "Use:" not in str(raised.value)


@pytest.mark.parametrize(("words", "argument"), [
    ("method=sft", "per_device_train_batch_size"),
    ("experiment=mi300x_grpo_gsm8k", "per_device_train_batch_size"),
    ("method=evaluate", "batch_size"),
    ("method=tune/batch", "per_device_train_batch_size"),  # of its recipe
])  # fmt: skip
def test_arguments_of_the_method_are_offered(words, argument):
    with pytest.raises(UserError) as raised:
        composed(words, "batch_size=4")
    assert f"Use: method.args.{argument}=4." in str(raised.value)


def test_columns_with_common_names():
    fields = ("question", "solution")
    both = "data.columns.prompt=question data.columns.answer=solution"
    assert near_names.columns_hint(fields, ("prompt", "answer")) == both
    assert near_names.columns_hint(fields, ("prompt", "score")) is None
