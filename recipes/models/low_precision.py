"""Convert linear layers to fp8 products and weights to nf4, with the packages for each."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from launch.core.errors import UserError


def package(module: str, precision: str, name: str) -> ModuleType:
    """Return the imported module for a precision. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{precision} needs {name}: {error}. Install it where the ranks run: pip install "
            f"{name}."
        ) from error


def to_float8(model: nn.Module, pads: bool = True) -> nn.Module:
    """Return the model with fp8 linear layers, except the head and adapters (torchao, per tensor).

    The product for a weight's gradient sums over the batch's tokens, whose number must be a
    multiple of 16 for _scaled_mm. `pads` pads batches that the trainer does not, and costs a tenth
    of the speed. On a CPU torchao rounds to fp8 and multiplies in fp32.
    """
    float8 = package("torchao.float8", "fp8", "torchao")
    config = float8.Float8LinearConfig(emulate=not torch.cuda.is_available(), pad_inner_dim=pads)
    converted: nn.Module = float8.convert_to_float8_training(
        model, config=config, module_filter_fn=takes_float8
    )
    return converted


def takes_float8(module: nn.Module, name: str) -> bool:
    """Return whether a module is converted; torch._scaled_mm needs sizes in multiples of 16."""
    if not isinstance(module, nn.Linear) or name.endswith("lm_head") or "lora_" in name:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def nf4(compute: torch.dtype) -> BitsAndBytesConfig:
    """Return the configuration of 4-bit linear layers except the head; a scale per 64 weights."""
    package("bitsandbytes", "nf4", "bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` without quantization, in its dtype before quantization."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit  # installed only if weights are in 4 bits

    unpacked: torch.Tensor = dequantize_4bit(weight.detach(), state)
    return unpacked
