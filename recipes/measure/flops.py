"""Count the floating-point operations of training, for TFLOPS and MFU."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig


def flops_per_token(model: nn.Module, sequence_tokens: float, reference: bool = False) -> float:
    """Return the operations of training on one token, including causal attention.

    Each weight of a matrix product counts 6, or 4 if it is frozen. Recomputation by gradient
    checkpointing does not count (MFU, not HFU; arXiv:2204.02311, appendix B). `sequence_tokens` is
    the mean length of a sequence. `reference` adds the forward pass of a frozen copy.
    """
    config = model.config.get_text_config()  # of a model of text and images, the text's part
    embedding = 0 if config.tie_word_embeddings else _numel(model.get_input_embeddings().weight)
    trained = sum(_numel(p) for p in model.parameters() if p.requires_grad)
    frozen = sum(_numel(p) for p in model.parameters() if not p.requires_grad)
    if trained >= embedding and not frozen:
        trained -= embedding
    else:
        frozen -= embedding
    # Layers may differ. Scores of linear attention do not depend on the length.
    count = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or [""] * count
    attending = [n for n in range(count) if types[n] != "linear_attention"]
    each = getattr(config, "per_layer_config", [config] * count)
    width = sum(_width(each[n]) for n in attending)
    # Scores and weighted sum take 4 operations per pair of positions and dimension. Half of the
    # pairs are masked, and the backward pass takes twice as many operations: 4 / 2 * 3 = 6.
    attention = 6 * width * sequence_tokens
    forward = 2 * (trained + frozen) + attention / 3
    return 6 * trained + 4 * frozen + attention + (forward if reference else 0.0)


def _width(layer: PretrainedConfig) -> int:
    """Return the size of all queries of a token."""
    heads = getattr(layer, "num_attention_heads", 0)  # state-space models have none
    return int(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // max(heads, 1)))


def _numel(parameter: nn.Parameter) -> int:
    """Return a parameter's full size. Under ZeRO-3, the parameter itself is empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
