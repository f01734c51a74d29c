"""List the linear layers that an adapter changes, and count the bytes that it adds to each.

The counts come from the code of peft 0.21 (tuners.lora.layer.Linear, tuners.lora.dora) and from
fake tensors, as in launch/estimate/activations.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launch.schema import Adapter, Model
from launch.schema.shapes import LINEARS, linear_sizes

ATTENTION, GATE_UP, DOWN = LINEARS[:4], ("gate_proj", "up_proj"), "down_proj"


def layers(model: Model, adapter: Adapter) -> list[str]:
    """Return the names of the linear layers with an adapter, by default all LINEARS.

    Experts have none, because they are not separate linear layers (launch/schema/shapes.py).

    A list in the configuration file of adapter.path has priority over adapter.target_modules. Its
    entries have the form q_proj or self_attn.q_proj.
    """
    target = adapter.target_modules
    if adapter.path and (file := Path(adapter.path) / "adapter_config.json").is_file():
        target = json.loads(file.read_text(encoding="utf-8")).get("target_modules")
    names = {str(name).rpartition(".")[2] for name in target} if isinstance(target, list) else set()
    possible = ATTENTION if model.num_experts else LINEARS
    return [name for name in possible if name in names] or list(possible)


def trainable_parameters(model: Model, adapter: Adapter) -> int:
    """Return the number of parameters that receive gradients.

    LoRA has rank * (inputs + outputs) parameters per linear layer (arXiv:2106.09685). DoRA adds a
    magnitude per output (arXiv:2402.09353).
    """
    if adapter.rank is None:
        return model.num_parameters
    sizes = dict(zip(LINEARS, linear_sizes(model), strict=True))
    adapted = (sizes[name] for name in layers(model, adapter))
    each = (adapter.rank * (i + o) + (o if adapter.dora else 0) for i, o in adapted)
    return model.num_layers * sum(each)


@dataclass(frozen=True)
class AdapterLayers:
    """The adapted linear layers of one decoder layer. They are W x + B A x, with the base W."""

    sizes: dict[str, tuple[int, int]]  # name -> (inputs, outputs)
    rank: int
    dropout: bool
    dora: bool
    # bytes per weight of A and B: 4, or 2 if the strategy casts to 16 bits
    width: int
    out: int  # bytes per element of a product's output
    recast: bool  # DoRA makes a copy of each base weight, by a cast or by unpacking 4 bits

    @classmethod
    def of(
        cls, model: Model, adapter: Adapter, width: int, out: int, recast: bool
    ) -> AdapterLayers:
        all_sizes = dict(zip(LINEARS, linear_sizes(model), strict=True))
        sizes = {name: all_sizes[name] for name in layers(model, adapter)}
        return cls(sizes, adapter.rank or 0, adapter.dropout > 0, adapter.dora, width, out, recast)

    @property
    def is_mixed(self) -> bool:
        """Return whether weights are fp32 and products 16 bits.

        Then peft casts the input of a layer to fp32, and autocast casts it back to 16 bits for A.
        """
        return self.width > self.out

    def saved_per_token(self) -> float:
        """Return the bytes per token that all layers save for the backward.

        Each saves its input (as A reads it, and after dropout) and the output of A. With DoRA, it
        also saves the outputs of W and B, for the gradient of the magnitude.
        """
        # the mask of dropout has a byte per element
        inputs = sum(i for i, _ in self.sizes.values()) * (self.out + self.dropout)
        if not self.is_mixed and not self.dropout:
            # q, k and v share an input, and so do gate and up. Attention saves the input of o.
            groups = (LINEARS[:3], GATE_UP, (DOWN,))
            shared = [[self.sizes[n][0] for n in group if n in self.sizes] for group in groups]
            inputs = self.out * sum(sizes[0] for sizes in shared if sizes)
        outputs = 2 * self.out * sum(o for _, o in self.sizes.values()) if self.dora else 0
        return inputs + self.out * self.rank * len(self.sizes) + outputs

    def weight_copies(self) -> float:
        """Return the bytes of 16-bit copies of A and B, which autocast keeps during a forward."""
        copies = 2.0 * self.rank * sum(i + o for i, o in self.sizes.values())
        return copies if self.is_mixed else 0.0

    def dora_weights(self) -> float:
        """Return the bytes of weights that DoRA saves for the backward.

        With dropout, it casts W again to recompute the output of W.
        """
        recomputes = self.dora and self.dropout and self.is_mixed
        return 2.0 * sum(i * o for i, o in self.sizes.values()) if recomputes else 0.0

    def forward_bytes(self, name: str, tokens: int) -> float:
        """Return the bytes that the forward of one layer needs in addition to those it saves."""
        inputs, outputs = self.sizes[name]
        # the input in fp32, and the output of dropout
        read = inputs * (self.width * (1 + self.dropout) if self.is_mixed else 0)
        if not self.dora:
            # the outputs of W and B, and the latter scaled
            return tokens * (read + 3 * self.out * outputs)
        matrix = self.width * inputs * outputs
        # B A is computed from an identity matrix, which the graph keeps.
        eye = (2 if self.is_mixed else self.width) * inputs * inputs
        base = matrix * self.recast
        product = self.width * inputs * inputs * self.is_mixed + eye + self.out * inputs * outputs
        norm = eye + 3 * matrix + base  # B A, B A scaled, and the sum with W
        output = eye + matrix + base + 3 * self.width * tokens * outputs
        return tokens * read + max(product, norm, output)
