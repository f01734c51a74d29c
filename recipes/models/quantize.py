"""Convert a model's weights to the dtype that they are served in: 16 or 32 bits, or 8 bits.

8-bit weights use the format compressed-tensors, which vLLM and transformers read
(https://github.com/vllm-project/compressed-tensors): `weight` (out, in) in 8 bits, and a scale for
each row, `weight_scale` (out, 1) in bf16, so that weight = codes x scale. Activations are scaled
per token at run time. Embedding, head and norms stay in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from launch.core.errors import UserError

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class EightBits:
    """Describe a format of compressed-tensors: its names, dtype and largest number."""

    format: str
    type: str
    dtype: torch.dtype
    most: float


EIGHT_BITS = {
    "fp8": EightBits("float-quantized", "float", torch.float8_e4m3fn, 448.0),
    # -128 is not used, so that codes are symmetric
    "int8": EightBits("int-quantized", "int", torch.int8, 127.0),
}
NAMES = [*PLAIN, *EIGHT_BITS]
# torch._scaled_mm's fp8 products, and int8 products of the same kernels, need sizes that are
# multiples of this
MULTIPLE = 16
# Parts of the names of linear layers' weights in qwen3, qwen2 and llama
LAYERS, LINEAR = (".layers.", "_proj.weight")


def quantized(weight: torch.Tensor, bits: EightBits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (out, in) and scales (out, 1) in bf16; a row's maximum gets the largest code.

    The codes are computed from the rounded scale, so its rounding adds no error. A row of zeros has
    scale 1.
    """
    exact = weight.float()
    scale = (exact.abs().amax(dim=1, keepdim=True) / bits.most).to(torch.bfloat16)
    scale[scale == 0] = 1
    # If the scale was rounded down, the largest codes would leave the range
    codes = (exact / scale.float()).clamp(-bits.most, bits.most)
    return (codes if bits.dtype.is_floating_point else codes.round()).to(bits.dtype), scale


@dataclass
class Converter:
    """Convert weights one by one to `weights` (None: unchanged), and sum the error."""

    weights: str | None
    num_quantized: int = 0
    lost: float = 0.0  # sum of squared differences, over the tensors whose dtype changed
    whole: float = 0.0  # sum of squares of these tensors
    worst: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that replace `weight`, by name.

        Raises UserError if it is not finite, or has an unsupported shape for 8 bits.
        """
        if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
            return {name: weight}
        dtype = weight.dtype if self.weights is None else PLAIN.get(self.weights, torch.bfloat16)
        rounded = weight.to(dtype)
        if not torch.isfinite(rounded).all():
            raise UserError(
                f"{name} is not finite in {str(dtype).removeprefix('torch.')}: the model is "
                "damaged or its numbers exceed this format. Use an earlier checkpoint, or "
                "method.args.weights=bf16."
            )
        bits = EIGHT_BITS.get(self.weights or "")
        if bits and LAYERS in name and weight.ndim > 1:
            if (
                weight.ndim != 2
                or not name.endswith(LINEAR)
                or any(n % MULTIPLE for n in weight.shape)
            ):
                raise UserError(
                    f"method.args.weights={self.weights}: {name} of shape {tuple(weight.shape)} is "
                    "not a linear layer of qwen3, qwen2 or llama with sizes in multiples of "
                    f"{MULTIPLE}. Use: method.args.weights=bf16."
                )
            codes, scale = quantized(weight, bits)
            self._count(name, weight, codes.float() * scale.float())
            self.num_quantized += 1
            return {name: codes, f"{name}_scale": scale}
        if dtype != weight.dtype:
            self._count(name, weight, rounded)
        return {name: rounded}

    def figures(self) -> dict[str, Any]:
        """Return figures for result.json.

        `weights_error` is |written - original| / |original| over all tensors that changed
        (Frobenius norms).
        """
        if not self.whole:
            return {"weights_error": 0.0}
        return {
            "weights_error": (self.lost / self.whole) ** 0.5,
            "weights_error_worst": self.worst,
            "num_quantized": self.num_quantized,
        }

    def _count(self, name: str, weight: torch.Tensor, written: torch.Tensor) -> None:
        exact = weight.float()
        lost, whole = (written.float() - exact).norm().item() ** 2, exact.norm().item() ** 2
        self.lost, self.whole = self.lost + lost, self.whole + whole
        error = (lost / whole) ** 0.5 if whole else 0.0
        if error >= self.worst.get("error", 0.0):
            self.worst = {"name": name, "error": error}


def served_config(content: dict[str, Any], weights: str | None) -> dict[str, Any]:
    """Return config.json of a model whose weights were converted."""
    if weights is None:
        return content
    dtype = str(PLAIN.get(weights, torch.bfloat16)).removeprefix("torch.")
    served = {key: value for key, value in content.items() if key != "torch_dtype"}
    served["dtype"] = dtype
    if weights in EIGHT_BITS:
        bits = EIGHT_BITS[weights]
        common = {"num_bits": 8, "type": bits.type, "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
        }
        served["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": bits.format,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
    return served
