"""Test the operations of models whose configurations lack what a plain text model has."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.measure.flops import flops_per_token

TEXT = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


@pytest.mark.parametrize(("kind", "values", "attention"), [
    ("mamba", TEXT, 0),
    ("qwen3", {**TEXT, **HEADS}, 6 * 2 * 4 * 10),
    ("qwen3_5_text", {**TEXT, **HEADS, "layer_types": ["linear_attention"]}, 0),
    ("gemma4_text", {**TEXT, **HEADS, "global_head_dim": 8}, 6 * 2 * 8 * 10),
    ("gemma3", {"text_config": {**TEXT, **HEADS}}, 6 * 2 * 4 * 10),
])  # fmt: skip
def test_attention_of_models_without_heads_and_of_text_in_a_larger_model(kind, values, attention):
    config = AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert flops_per_token(model, 10) - flops_per_token(model, 0) == pytest.approx(attention)
