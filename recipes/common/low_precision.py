"""fp8 products in place of a model's linear layers, weights in nf4, and the packages that low precisions need."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from recipes.common.errors import UserError


def package(module: str, precision: str, name: str) -> ModuleType:
    """Raises UserError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{precision} needs {name}: {error}. Install it where the ranks run: pip install {name}.") from error


def to_float8(model: nn.Module, pads: bool = True) -> nn.Module:
    """Linear layers but the head, and but an adapter's, compute in fp8, scaled tensor by tensor (torchao). Raises UserError.

    The product of a weight's gradient runs over the batch's tokens, and _scaled_mm takes multiples of 16: `pads` adds them to batches that
    the trainer does not fill up, at a tenth of the speed. A CPU has no such products: there torchao rounds to fp8 and multiplies in fp32.
    """
    float8 = package("torchao.float8", "fp8", "torchao")
    config = float8.Float8LinearConfig(
        emulate=not torch.cuda.is_available(),
        pad_inner_dim=pads,
    )
    converted: nn.Module = float8.convert_to_float8_training(model, config=config, module_filter_fn=takes_float8)
    return converted


def takes_float8(module: nn.Module, name: str) -> bool:
    """fp8 products need sizes that are multiples of 16 (torch._scaled_mm)."""
    if not isinstance(module, nn.Linear) or name.endswith("lm_head") or "lora_" in name:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def nf4(compute: torch.dtype) -> BitsAndBytesConfig:
    """How transformers loads linear layers, but the head, in 4 bits with an fp32 scale for 64 weights. Raises UserError."""
    package("bitsandbytes", "nf4", "bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """`weight` as products see it: unpacked where it is in 4 bits, in the dtype that it was quantized from."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit  # only where weights are in 4 bits

    unpacked: torch.Tensor = dequantize_4bit(weight.detach(), state)
    return unpacked
