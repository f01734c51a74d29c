"""Test which models get attention without masks."""

import pytest
from omegaconf import OmegaConf
from transformers import AutoConfig

from recipes.models import packed_attention


@pytest.mark.parametrize(("kind", "keys", "expected"), [
    ("qwen3", {}, packed_attention.NAME),
    ("mixtral", {"sliding_window": None}, packed_attention.NAME),
    ("mistral", {"sliding_window": 16}, "sdpa"),  # without a mask, the window would be ignored
    ("olmo3", {}, "sdpa"),
    ("gemma3_text", {}, "sdpa"),
    ("gpt_oss", {}, "eager"),  # sdpa would ignore the sinks
], ids=str)  # fmt: skip
def test_windows_and_sinks_get_an_attention_that_respects_them(kind, keys, expected):
    config = OmegaConf.create({"hardware": {"attention": "sdpa"}, "method": {"name": "sft"}})
    assert packed_attention.implementation(config, AutoConfig.for_model(kind, **keys)) == expected
