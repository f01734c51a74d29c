"""Build models with one small layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def small_model(
    architecture: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **keys: Any
) -> PreTrainedModel:
    """Return a model with random weights of `seed`. `keys` change its configuration."""
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 320, **keys}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **shape), dtype=dtype
    )
