"""Floating-point operations of training, for TFLOPS and MFU."""

from __future__ import annotations

from torch import nn


def flops_per_token(model: nn.Module, sequence_tokens: float, reference: bool = False) -> float:
    """Operations that training on one token needs: 6 per weight of a matrix product, 4 where it is frozen, and causal attention.

    Recomputation by gradient checkpointing is work the model does not need, so it does not count (MFU, not HFU; arXiv:2204.02311,
    appendix B). `sequence_tokens` is how far attention reaches on average rows; `reference` adds the forward pass of a frozen copy.
    """
    config = model.config
    embedding = 0 if config.tie_word_embeddings else _numel(model.get_input_embeddings().weight)
    trained = sum(_numel(p) for p in model.parameters() if p.requires_grad)
    frozen = sum(_numel(p) for p in model.parameters() if not p.requires_grad)
    if trained >= embedding and not frozen:
        trained -= embedding
    else:
        frozen -= embedding
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Scores and weighted sum are 4 operations a pair of positions; half of the pairs are masked; backward is twice forward.
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim * sequence_tokens
    forward = 2 * (trained + frozen) + attention / 3
    return 6 * trained + 4 * frozen + attention + (forward if reference else 0.0)


def _numel(parameter: nn.Parameter) -> int:
    """Of the whole parameter: ZeRO-3 leaves an empty one on each rank and notes what it was."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
