"""Count the floating-point operations of training, for TFLOPS and MFU."""

from __future__ import annotations

from torch import nn


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
    heads = getattr(config, "num_attention_heads", 0)  # state-space models have none
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    # Scores and weighted sum take 4 operations per pair of positions and dimension. Half of the
    # pairs are masked, and the backward pass takes twice as many operations: 4 / 2 * 3 = 6.
    attention = 6 * config.num_hidden_layers * heads * head_dim * sequence_tokens
    forward = 2 * (trained + frozen) + attention / 3
    return 6 * trained + 4 * frozen + attention + (forward if reference else 0.0)


def _numel(parameter: nn.Parameter) -> int:
    """Return a parameter's full size. Under ZeRO-3, the parameter itself is empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
