"""Compute causal attention within the documents of packed rows, without a mask.

transformers makes a mask for every batch. To find out whether it is needed, transformers reads from
the GPU, so the host waits for all queued work. SFT and DPO need no mask, since they pad the ends of
rows, which no token attends to. GRPO pads prompts on the left, so its batches get a mask unless
they are packed, for example in generation.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

# Values of attn_implementation. transformers makes no mask for a name without a mask function.
NAME = "documents"
PADDED = "documents_or_padded"  # the same, but with a mask for batches that have padding


def implementation(config: DictConfig, model_config: PretrainedConfig) -> str:
    """Return attn_implementation for the run's model. Register it with transformers if needed.

    Models with attention sinks have no sdpa, so they use eager.
    """
    hardware, method = config.hardware, OmegaConf.select(config, "method.name")
    packs = method == "grpo" and OmegaConf.select(config, "step.rows") == "packed"
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if hardware.attention == "sdpa" and not getattr(kind, "_supports_sdpa", True):
        return "eager"
    is_plain = not (packs or method in ("sft", "dpo")) or not fits(model_config)
    if hardware.attention != "sdpa" or is_plain:
        return hardware.attention
    kernel = hardware.get("packed_attention")
    longest = OmegaConf.select(config, "trainer_args.max_length")

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        document_starts: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # The other kernels support only 16-bit inputs.
        if document_starts is None or kernel == "sdpa" or value.dtype is torch.float32:
            mask = attention_mask
            if document_starts is not None:
                # (1, 1, tokens, tokens): True where a token attends to another.
                positions = torch.arange(query.shape[2], device=document_starts.device)
                documents = torch.bucketize(positions, document_starts[1:], right=True)
                is_same = documents[:, None] == documents
                mask = (is_same & (positions[:, None] >= positions))[None, None]
            return sdpa_attention_forward(
                module, query, key, value, mask, scaling=scaling, dropout=dropout
            )
        # Under autocast, norms return queries and keys in fp32, and autocast casts them back only
        # for torch's own attention.
        packed = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
        output = KERNELS[kernel](*packed, document_starts, longest or query.shape[2], scaling)
        return output[None], None

    name = PADDED if packs else NAME
    AttentionInterface.register(name, forward)
    if packs:
        AttentionMaskInterface.register(PADDED, _padding_mask)
    return name


def fits(model_config: PretrainedConfig) -> bool:
    """Return whether all layers have full attention. The kernels support no sliding window."""
    config = model_config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "sliding_window", None)


def _padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Return sdpa's mask, or None if there is no padding.

    Otherwise transformers would make a mask of (tokens, tokens) for packed rows.
    """
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float
) -> Tensor:
    """Return attention by the kernel of torch 2.10 and newer.

    `longest` is an upper bound. The exact length would recompile the kernel at every step.
    """
    from torch.nn.attention.varlen import varlen_attn  # missing from the torch of some images

    causal = {"scale": scaling, "window_size": (-1, 0), **SHARED_KEYS}
    return varlen_attn(query, key, value, starts, starts, longest, longest, **causal)


def _shared_keys() -> dict[str, bool]:
    """Return the argument for heads that share keys. Kernels before torch 2.12 detect them."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


SHARED_KEYS = _shared_keys()  # a constant, because Dynamo warns when it traces a cached function


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # only in images with the package

    return flash_attn_varlen_func(
        query, key, value, starts, starts, longest, longest, softmax_scale=scaling, causal=True
    )


def _by_document(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float
) -> Tensor:
    """Return attention by the kernel of padded rows, for one document after the other."""
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    outputs = []
    for begin, end in itertools.pairwise(starts.tolist()):
        parts = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


KERNELS = {"varlen": _varlen, "flash_attention_2": _flash_attention}


@contextlib.contextmanager
def by_document() -> Iterator[None]:
    """Compute packed rows with the kernel of padded rows, which is slower."""
    kernels = dict(KERNELS)
    use_by_document()
    try:
        yield
    finally:
        KERNELS.update(kernels)


def use_by_document() -> None:
    KERNELS.update(dict.fromkeys(KERNELS, _by_document))
