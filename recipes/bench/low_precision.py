"""fp8 products in place of a model's linear layers, and the packages that low precisions need."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import nn

from recipes.common.errors import UserError


def package(module: str, precision: str, name: str) -> ModuleType:
    """Raises UserError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{precision} needs {name}: {error}. Install it where the ranks run: pip install {name}.") from error


def to_float8(model: nn.Module) -> nn.Module:
    """Linear layers but the head, and but an adapter's, compute in fp8, scaled tensor by tensor (torchao). Raises UserError."""
    float8 = package("torchao.float8", "fp8", "torchao")
    converted: nn.Module = float8.convert_to_float8_training(model, module_filter_fn=takes_float8)
    return converted


def takes_float8(module: nn.Module, name: str) -> bool:
    """fp8 products need sizes that are multiples of 16 (torch._scaled_mm)."""
    if not isinstance(module, nn.Linear) or name.endswith("lm_head") or "lora_" in name:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0
