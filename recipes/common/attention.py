"""Attention of a trainer's batches: causal, within documents where rows are packed, and with no mask to make or to read.

transformers makes a mask for every batch, and asks the GPU whether it needs one: the host waits for all that is queued. Batches of SFT
and DPO are padded after their rows, where no token looks, so they need none. GRPO's prompts are padded in front, so a batch that is not
packed, of generation for one, gets its mask.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "documents"  # as attn_implementation; a name without a mask of its own gets none from transformers
PADDED = "documents_or_padded"  # the same, with a mask where a batch comes with one


def implementation(config: DictConfig) -> str:
    """Return the attn_implementation of `config`'s model, registered with transformers."""
    hardware, method = config.hardware, OmegaConf.select(config, "method.name")
    packs = method == "grpo" and OmegaConf.select(config, "step.rows") == "packed"
    if hardware.attention != "sdpa" or not (packs or method in ("sft", "dpo")):
        return hardware.attention
    kernel, longest = hardware.get("packed_attention"), OmegaConf.select(config, "trainer_args.max_length")

    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        document_starts: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if document_starts is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout)
        if kernel == "sdpa" or value.dtype is torch.float32:  # the other kernels compute in 16 bits only
            mask = _mask(document_starts, query.shape[2])
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout)
        # Norms of queries and keys leave them in fp32 under autocast, which casts for torch's own attention only.
        found = KERNELS[kernel](
            *(part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value)), document_starts, longest or query.shape[2], scaling
        )
        return found[None], None

    name = PADDED if packs else NAME
    AttentionInterface.register(name, forward)
    if packs:
        AttentionMaskInterface.register(PADDED, _mask_of_padding)
    return name


def fits(model: PreTrainedModel) -> bool:
    """Return whether each token of `model` may look at all before it: the kernels know no window."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "sliding_window", None)


def _mask_of_padding(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Return sdpa's, or None for a batch without padding. transformers would make one of (tokens, tokens) for packed rows."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def _mask(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """(1, 1, tokens, tokens): True where a token may look."""
    places = torch.arange(tokens, device=starts.device)
    documents = torch.bucketize(places, starts[1:], right=True)
    return ((documents[:, None] == documents) & (places[:, None] >= places))[None, None]


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    """torch's own, from 2.10. `longest` is a bound: a kernel compiled for each length would be another one every step."""
    from torch.nn.attention.varlen import varlen_attn  # torch of some images is older

    return varlen_attn(query, key, value, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), **_gqa())


@functools.cache
def _gqa() -> dict[str, bool]:
    """Say that several heads share keys, to a torch that asks; before 2.12 the kernel saw it by itself."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func  # of images that hold the package

    return flash_attn_varlen_func(query, key, value, starts, starts, longest, longest, softmax_scale=scaling, causal=True)


KERNELS = {"varlen": _varlen, "flash_attention_2": _flash_attention}
