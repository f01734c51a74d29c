"""Convert a model's weights to the dtype for serving: 32, 16 or 8 bits.

8-bit weights use the format compressed-tensors, which vLLM and transformers read
(https://github.com/vllm-project/compressed-tensors). `weight` (out, in) contains 8-bit codes, and
`weight_scale` (out, 1) a bf16 scale for each row. Their product approximates the weight.
Activations are scaled per token at run time. Embedding, head and norms stay in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from launch.core.errors import UserError

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class EightBits:
    """Describe an 8-bit format of compressed-tensors."""

    format: str
    type: str
    dtype: torch.dtype
    max_code: float


EIGHT_BITS = {
    "fp8": EightBits("float-quantized", "float", torch.float8_e4m3fn, 448.0),
    # symmetric, so -128 is not used
    "int8": EightBits("int-quantized", "int", torch.int8, 127.0),
}
NAMES = [*PLAIN, *EIGHT_BITS]
# The fp8 and int8 kernels of torch._scaled_mm need sizes that are multiples of this.
MULTIPLE = 16
# Parts of the names of linear layers' weights in qwen3, qwen2 and llama
LAYERS, LINEAR = (".layers.", "_proj.weight")


def quantize(weight: torch.Tensor, bits: EightBits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit codes (out, in) and bf16 scales (out, 1). A row's maximum gets the largest code.

    The codes are computed from the rounded scale, so its rounding adds no error. A row of zeros has
    scale 1.
    """
    exact = weight.float()
    scale = (exact.abs().amax(dim=1, keepdim=True) / bits.max_code).to(torch.bfloat16)
    scale[scale == 0] = 1
    # If the scale was rounded down, the largest codes would be out of range.
    codes = (exact / scale.float()).clamp(-bits.max_code, bits.max_code)
    return (codes if bits.dtype.is_floating_point else codes.round()).to(bits.dtype), scale


@dataclass
class Converter:
    """Convert weights one at a time to the dtype `weights` (None: unchanged), and sum the error."""

    weights: str | None
    num_quantized: int = 0
    squared_error: float = 0.0  # sum over the tensors whose dtype changed
    squared_norm: float = 0.0  # of these tensors
    worst: dict[str, Any] = field(default_factory=dict)  # name and relative error of a tensor

    def __call__(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that replace `weight`, by name.

        Raises UserError if the weight is not finite, or if its shape rules out 8 bits.
        """
        if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
            return {name: weight}
        dtype = weight.dtype if self.weights is None else PLAIN.get(self.weights, torch.bfloat16)
        rounded = weight.to(dtype)
        if not torch.isfinite(rounded).all():
            raise UserError(
                f"{name} is not finite in {str(dtype).removeprefix('torch.')}, so the model is "
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
            codes, scale = quantize(weight, bits)
            self._add_error(name, weight, codes.float() * scale.float())
            self.num_quantized += 1
            return {name: codes, f"{name}_scale": scale}
        if dtype != weight.dtype:
            self._add_error(name, weight, rounded)
        return {name: rounded}

    def figures(self) -> dict[str, Any]:
        """Return figures for result.json.

        `weights_error` is |converted - original| / |original| over all tensors whose dtype changed
        (Frobenius norms).
        """
        if not self.squared_norm:
            return {"weights_error": 0.0}
        return {
            "weights_error": (self.squared_error / self.squared_norm) ** 0.5,
            "weights_error_worst": self.worst,
            "num_quantized": self.num_quantized,
        }

    def _add_error(self, name: str, weight: torch.Tensor, converted: torch.Tensor) -> None:
        exact = weight.float()
        squared_error = (converted.float() - exact).norm().item() ** 2
        squared_norm = exact.norm().item() ** 2
        self.squared_error += squared_error
        self.squared_norm += squared_norm
        error = (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0
        if error >= self.worst.get("error", 0.0):
            self.worst = {"name": name, "error": error}


def served_config(content: dict[str, Any], weights: str | None) -> dict[str, Any]:
    """Return the content of config.json for weights converted to the dtype `weights`."""
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
