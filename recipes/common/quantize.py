"""A model's weights in the dtype that they are served in: 16 or 32 bits, or linear layers in 8 bits.

8 bits are written as compressed-tensors names them, which vLLM and transformers read (https://github.com/vllm-project/compressed-tensors):
`weight` (out, in) in 8 bits, and a scale for each row, `weight_scale` (out, 1) in bf16, so that weight = codes x scale. Activations get
a scale for each token as they come. Embedding, head and norms stay in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from recipes.common.errors import UserError

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class EightBits:
    """A format of compressed-tensors: its names, its dtype and the largest number in it."""

    format: str
    type: str
    dtype: torch.dtype
    most: float


EIGHT_BITS = {
    "fp8": EightBits("float-quantized", "float", torch.float8_e4m3fn, 448.0),
    "int8": EightBits("int-quantized", "int", torch.int8, 127.0),  # not -128: the codes are symmetric
}
NAMES = [*PLAIN, *EIGHT_BITS]
MULTIPLE = 16  # torch._scaled_mm's fp8 products, and int8 ones of the same kernels, take sizes that are multiples of it
LAYERS, LINEAR = ".layers.", "_proj.weight"  # how qwen3, qwen2 and llama name the weights of their linear layers


def quantized(weight: torch.Tensor, bits: EightBits) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (out, in) and scales (out, 1) in bf16: the largest number of a row becomes the largest code.

    The scale is rounded first, so that its rounding costs nothing. A row of zeros has scale 1.
    """
    exact = weight.float()
    scale = (exact.abs().amax(dim=1, keepdim=True) / bits.most).to(torch.bfloat16)
    scale[scale == 0] = 1
    codes = (exact / scale.float()).clamp(-bits.most, bits.most)  # a scale that was rounded down would leave the range
    return (codes if bits.dtype.is_floating_point else codes.round()).to(bits.dtype), scale


def restored(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In fp32, (out, in): what the products compute with."""
    return codes.float() * scale.float()


def is_linear(name: str, weight: torch.Tensor) -> bool:
    """Whether 8 bits hold it. Raises UserError for a weight of the layers that is no linear layer known here."""
    if LAYERS not in name or weight.ndim < 2:
        return False
    if weight.ndim != 2 or not name.endswith(LINEAR):
        raise UserError(
            f"{name} of shape {tuple(weight.shape)}: weights in 8 bits are written for the linear layers of qwen3, qwen2 and llama. "
            "Use: method.args.weights=bf16."
        )
    return True


def check_size(name: str, weight: torch.Tensor, weights: str) -> None:
    """Raises UserError."""
    if any(size % MULTIPLE for size in weight.shape):
        outputs, inputs = weight.shape
        raise UserError(
            f"method.args.weights={weights}: {name} has {outputs} outputs and {inputs} inputs, and products in 8 bits take multiples of "
            f"{MULTIPLE}. Use: method.args.weights=bf16."
        )


@dataclass
class Converter:
    """Weights one after another as `weights` says; None: as they are. Counts what that loses, by tensor."""

    weights: str | None
    num_quantized: int = 0
    lost: float = 0.0  # sum of squared differences, over the tensors that changed their dtype
    whole: float = 0.0  # sum of squares of the same
    worst: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that take its place. Raises UserError for one that is not finite, does not fit, or is in 8 bits already."""
        if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
            if self.weights is None:
                return {name: weight}
            raise UserError(
                f"{name} is in {_dtype(weight)}: quantized already. Use: the weights it was made from, or no method.args.weights."
            )
        if not torch.isfinite(weight).all():
            raise UserError(f"{name} holds NaN or infinite numbers: this model is broken. Use: an earlier checkpoint.")
        bits = EIGHT_BITS.get(self.weights or "")
        if bits and is_linear(name, weight):
            check_size(name, weight, str(self.weights))
            codes, scale = quantized(weight, bits)
            self._count(name, weight, restored(codes, scale))
            self.num_quantized += 1
            return {name: codes, f"{name}_scale": scale}
        dtype = weight.dtype if self.weights is None else PLAIN.get(self.weights, torch.bfloat16)
        if dtype == weight.dtype:
            return {name: weight}
        rounded = weight.to(dtype)
        if not torch.isfinite(rounded).all():
            most = torch.finfo(dtype).max
            raise UserError(f"method.args.weights={self.weights}: {name} has numbers above {most:g}, its largest. Use: bf16 or fp32.")
        self._count(name, weight, rounded)
        return {name: rounded}

    def figures(self) -> dict[str, Any]:
        """Of result.json. `weights_error`: |written - original| / |original| over all tensors that changed (Frobenius norms)."""
        if not self.whole:
            return {"weights_error": 0.0}
        return {"weights_error": (self.lost / self.whole) ** 0.5, "weights_error_worst": self.worst, "num_quantized": self.num_quantized}

    def _count(self, name: str, weight: torch.Tensor, written: torch.Tensor) -> None:
        exact = weight.float()
        lost, whole = (written.float() - exact).norm().item() ** 2, exact.norm().item() ** 2
        self.lost, self.whole = self.lost + lost, self.whole + whole
        error = (lost / whole) ** 0.5 if whole else 0.0
        if error >= self.worst.get("error", 0.0):
            self.worst = {"name": name, "error": error}


def served_config(content: dict[str, Any], weights: str | None) -> dict[str, Any]:
    """config.json of a model whose weights were converted."""
    if weights is None:
        return content
    dtype = str(PLAIN.get(weights, torch.bfloat16)).removeprefix("torch.")
    found = {**{key: value for key, value in content.items() if key != "torch_dtype"}, "dtype": dtype}
    return {**found, "quantization_config": _quantization(EIGHT_BITS[weights])} if weights in EIGHT_BITS else found


def _quantization(bits: EightBits) -> dict[str, Any]:
    common = {"num_bits": 8, "type": bits.type, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": bits.format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
    }


def _dtype(weight: torch.Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")
