"""Test that training, sampling and evaluation agree on a model's thinking."""

import json

import pytest

from launch.config import thinking
from launch.config.compose import compose
from launch.rules.warnings import rule_warnings

SWITCH = "method.args.chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize(("overrides", "thinks"), [
    ("method=grpo model=qwen3_8b", False),
    ("method=sample model=qwen3_8b", False),
    ("method=evaluate model=qwen3_30b_a3b", False),
    (f"method=evaluate model=qwen3_8b {SWITCH}=true", True),
    ("method=sft model=qwen3_8b", None),
    ("method=chat model=qwen3_8b", None),
    ("method=serve model=qwen3_8b", None),
    ("method=evaluate model=llama3_1_8b", None),
    ("method=evaluate model=qwen3_76m", None),
])  # fmt: skip
def test_thinking_of_a_model(overrides, thinks):
    config = compose(["hardware=mi300x", *overrides.split()])
    assert thinking.of(config) is thinks
    keys = [line for line in rule_warnings(config) if line.startswith(SWITCH)]
    assert len(keys) == bool(thinks)  # 512 tokens cut thoughts off


@pytest.mark.parametrize(("template", "thinks"), [("{{ enable_thinking }}", False), ("a", None)])
@pytest.mark.parametrize("method", ["grpo", "evaluate"])
def test_a_directory_follows_its_template(tmp_path, template, thinks, method):
    shape = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads"), 8)
    shape |= {"model_type": "qwen3", "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    overrides = ["hardware=mi300x", f"method={method}", f"model.path={tmp_path}"]
    assert thinking.of(compose(overrides)) is thinks


@pytest.mark.parametrize("inner", ["model", "checkpoints/checkpoint-2"])
def test_evaluations_and_chats_have_the_value_of_their_run(tmp_path, inner):
    (tmp_path / inner).mkdir(parents=True)
    method = {"kind": "trainer", "args": {"chat_template_kwargs": {"enable_thinking": True}}}
    record = {"composition": {"method": method}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    overrides = ["hardware=mi300x", "model=qwen3_8b", f"model.path={tmp_path}/{inner}"]
    for more, thinks in (([], True), (["data=gsm8k"], True), ([f"{SWITCH}=false"], False)):
        assert thinking.of(compose([*overrides, "method=evaluate", *more])) is thinks
    assert thinking.of(compose([*overrides, "method=grpo"])) is False
    assert thinking.of(compose([*overrides, "method=chat"])) is True
    assert thinking.of(compose([*overrides, "method=serve"])) is True
    del method["args"]["chat_template_kwargs"]
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert thinking.of(compose([*overrides, "method=chat"])) is False
    assert thinking.of(compose([*overrides, "method=chat", f"{SWITCH}=true"])) is True
