"""Compute numbers of parameters and sizes from the shape of a model."""

from __future__ import annotations

from launch.schema import LINEARS as LINEARS
from launch.schema import Model


def linear_sizes(model: Model) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers of a decoder layer, in the order of LINEARS."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, wide = model.hidden_size, model.intermediate_size
    return [
        (hidden, query),
        (hidden, key),
        (hidden, key),
        (query, hidden),
        (hidden, wide),
        (hidden, wide),
        (wide, hidden),
    ]


def layer_parameters(model: Model) -> int:
    """Return the number of parameters of a decoder layer, with qwen2's biases and qwen3's norms."""
    biases = sum(size for _, size in linear_sizes(model)[:3]) if model.attention_bias else 0
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.architecture == "qwen3" else 0)
    return sum(i * o for i, o in linear_sizes(model)) + biases + norms


def parameters(model: Model) -> int:
    """Return the number of parameters. A tied output head is not counted again."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return model.num_layers * layer_parameters(model) + embeddings + model.hidden_size


def head_bytes(model: Model, width: float) -> float:
    """Return the bytes of one token's keys and values, for one head in all layers.

    `width` is the number of bytes per element.
    """
    return 2 * width * model.num_layers * model.head_dim
