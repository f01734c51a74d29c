"""Convert linear layers to fp8 products (torchao) or nf4 weights (bitsandbytes)."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from launch.core.errors import UserError


def import_package(module: str, precision: str, name: str) -> ModuleType:
    """Return the module. Raises UserError if its package `name` is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{precision} needs {name}: {error}. Where the ranks run: pip install {name}."
        ) from error


def to_float8(model: nn.Module, pads: bool = True) -> nn.Module:
    """Return the model with fp8 linear layers (one scale per tensor), except head and adapters.

    A weight's gradient needs a multiple of 16 tokens per batch, for _scaled_mm. `pads` pads batches
    that the trainer does not pad, which costs a tenth of the speed. On a CPU, torchao rounds to fp8
    and multiplies in fp32.
    """
    float8 = import_package("torchao.float8", "fp8", "torchao")
    config = float8.Float8LinearConfig(emulate=not torch.cuda.is_available(), pad_inner_dim=pads)
    converted: nn.Module = float8.convert_to_float8_training(
        model, config=config, module_filter_fn=supports_float8
    )
    return converted


def supports_float8(module: nn.Module, name: str) -> bool:
    """Return whether to convert a module. torch._scaled_mm needs sizes that are multiples of 16."""
    if not isinstance(module, nn.Linear) or name.endswith("lm_head") or "lora_" in name:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def nf4_config(compute: torch.dtype) -> BitsAndBytesConfig:
    """Configure 4-bit linear layers, except the head, with a scale for every 64 weights."""
    import_package("bitsandbytes", "nf4", "bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )


def dequantize(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` in its dtype before quantization."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit  # installed only if weights are in 4 bits

    unpacked: torch.Tensor = dequantize_4bit(weight.detach(), state)
    return unpacked
