"""Compute the bytes that an adapter adds to a decoder layer, and list the layers it changes.

Read from peft 0.21 (tuners.lora.layer.Linear, tuners.lora.dora) and counted on fake tensors, as in
launch/estimate/activations.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launch.schema import Adapter, Model
from launch.schema.shapes import LINEARS, linear_sizes

ATTENTION, GATE_UP, DOWN = LINEARS[:4], ("gate_proj", "up_proj"), "down_proj"


def layers(adapter: Adapter) -> list[str]:
    """Return the LINEARS that have the adapter; all by default.

    The file of adapter.path wins if it lists them, as q_proj or self_attn.q_proj.
    """
    target = adapter.target_modules
    if adapter.path and (file := Path(adapter.path) / "adapter_config.json").is_file():
        target = json.loads(file.read_text(encoding="utf-8")).get("target_modules")
    names = {str(name).rpartition(".")[2] for name in target} if isinstance(target, list) else set()
    return [name for name in LINEARS if name in names] or list(LINEARS)


def trainable_parameters(model: Model, adapter: Adapter) -> int:
    """Return the number of parameters that receive gradients.

    LoRA adds rank * (inputs + outputs) per linear layer (arXiv:2106.09685), DoRA one magnitude per
    output on top (arXiv:2402.09353).
    """
    if adapter.rank is None:
        return model.num_parameters
    sizes = dict(zip(LINEARS, linear_sizes(model), strict=True))
    adapted = (sizes[name] for name in layers(adapter))
    each = (adapter.rank * (i + o) + (o if adapter.dora else 0) for i, o in adapted)
    return model.num_layers * sum(each)


@dataclass(frozen=True)
class Adapted:
    """Describe an adapter as a micro-step sees it; bytes are those of one decoder layer."""

    sizes: dict[str, tuple[int, int]]  # (inputs, outputs) of the linear layers that it changes
    rank: int
    dropout: bool
    dora: bool
    # bytes per weight as products read it: 4, or 2 if the strategy casts to 16 bits
    width: int
    out: int  # bytes per element of a product's output
    recast: bool  # DoRA recreates each base weight, by a cast or by unpacking 4 bits

    @classmethod
    def of(cls, model: Model, adapter: Adapter, width: int, out: int, recast: bool) -> Adapted:
        sizes = dict(zip(LINEARS, linear_sizes(model), strict=True))
        on = {name: sizes[name] for name in layers(adapter)}
        return cls(on, adapter.rank or 0, adapter.dropout > 0, adapter.dora, width, out, recast)

    @property
    def copies(self) -> bool:
        """Return whether weights are fp32 and products 16 bits.

        peft casts a layer's input to fp32, and autocast casts it to 16 bits again for A.
        """
        return self.width > self.out

    def saved(self) -> float:
        """Return bytes per token that adapted layers keep.

        Each keeps its input (as A reads it, and after dropout), A's output and, with DoRA, the
        base's and B's outputs, from which the magnitude's gradient is computed.
        """
        # dropout's mask takes a byte per element
        each = sum(inputs for inputs, _ in self.sizes.values()) * (self.out + self.dropout)
        if not self.copies and not self.dropout:
            # q, k and v read one tensor, gate and up another; o reads what attention keeps
            groups = (LINEARS[:3], GATE_UP, (DOWN,))
            on = [[self.sizes[name][0] for name in group if name in self.sizes] for group in groups]
            each = self.out * sum(inputs[0] for inputs in on if inputs)
        outputs = 2 * self.out * sum(o for _, o in self.sizes.values()) if self.dora else 0
        return each + self.out * self.rank * len(self.sizes) + outputs

    def weights(self) -> float:
        """Return bytes of the 16-bit copies of A and B, which autocast keeps through a forward."""
        return 2.0 * self.rank * sum(i + o for i, o in self.sizes.values()) if self.copies else 0.0

    def matrices(self) -> float:
        """Return bytes that DoRA keeps, whatever the number of tokens.

        With dropout it recomputes the base's output, with a weight cast twice.
        """
        recomputes = self.dora and self.dropout and self.copies
        return 2.0 * sum(i * o for i, o in self.sizes.values()) if recomputes else 0.0

    def computing(self, name: str, tokens: int) -> float:
        """Return bytes that an adapted layer needs while it computes, beyond what it saves."""
        inputs, outputs = self.sizes[name]
        # its input in fp32, and dropout's output
        read = inputs * (self.width * (1 + self.dropout) if self.copies else 0)
        if not self.dora:
            # the outputs of the base and of B, and B's scaled
            return tokens * (read + 3 * self.out * outputs)
        matrix = self.width * inputs * outputs
        # the identity matrix from which B A is computed; the graph keeps it
        eye = (2 if self.copies else self.width) * inputs * inputs
        whole = matrix * self.recast
        made = self.width * inputs * inputs * self.copies + eye + self.out * inputs * outputs
        normed = eye + 3 * matrix + whole  # B A, B A scaled, and W added to it
        at_end = eye + matrix + whole + 3 * self.width * tokens * outputs
        return tokens * read + max(made, normed, at_end)
