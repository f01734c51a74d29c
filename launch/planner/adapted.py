"""What an adapter adds to a decoder layer: the linear layers that it is on, and the bytes of their tensors.

Read from peft 0.21 (tuners.lora.layer.Linear, tuners.lora.dora) and counted on fake tensors, as in launch/planner/activations.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launch.planner.shapes import LINEARS, linear_sizes
from launch.schema import Adapter, Model

ATTENTION, GATE_UP, DOWN = LINEARS[:4], ("gate_proj", "up_proj"), "down_proj"


def layers(adapter: Adapter) -> list[str]:
    """Of LINEARS, those that the adapter is on: what the file of adapter.path says, where it is there and lists them, as q_proj or
    self_attn.q_proj; all where it names none of them."""
    given = adapter.target_modules
    if adapter.path and (file := Path(adapter.path) / "adapter_config.json").is_file():
        given = json.loads(file.read_text(encoding="utf-8")).get("target_modules")
    named = {str(name).rpartition(".")[2] for name in given} if isinstance(given, list) else set()
    return [name for name in LINEARS if name in named] or list(LINEARS)


def trainable_parameters(model: Model, adapter: Adapter) -> int:
    """Parameters that receive gradients. LoRA adds rank * (inputs + outputs) a linear layer (arXiv:2106.09685),
    DoRA one magnitude an output on top (arXiv:2402.09353)."""
    if adapter.rank is None:
        return model.num_parameters
    sizes = dict(zip(LINEARS, linear_sizes(model), strict=True))
    found = [sizes[name] for name in layers(adapter)]
    return model.num_layers * sum(adapter.rank * (i + o) + (o if adapter.dora else 0) for i, o in found)


@dataclass(frozen=True)
class Adapted:
    """An adapter as a micro-step sees it. Bytes are of one decoder layer."""

    sizes: dict[str, tuple[int, int]]  # (inputs, outputs) of the linear layers that it is on
    rank: int
    dropout: bool
    dora: bool
    width: int  # bytes of its weights as products are given them: fp32, or 16 bits where the strategy casts them
    out: int  # bytes of an element that a product leaves
    recast: bool  # DoRA makes each base weight anew as its own are: cast, or unpacked from 4 bits

    @classmethod
    def of(cls, model: Model, adapter: Adapter, width: int, out: int, recast: bool) -> Adapted:
        sizes = dict(zip(LINEARS, linear_sizes(model), strict=True))
        on = {name: sizes[name] for name in layers(adapter)}
        return cls(on, adapter.rank or 0, adapter.dropout > 0, adapter.dora, width, out, recast)

    @property
    def copies(self) -> bool:
        """fp32 weights whose products are of 16 bits: peft makes a layer's input fp32, autocast makes it 16 bits for A again."""
        return self.width > self.out

    def saved(self) -> float:
        """For a token: what each adapted layer keeps of its input (as A reads it, and what dropout left of it), what A makes of it, and
        DoRA's two factors of the magnitude's gradient, the base's output and B's."""
        each = sum(self._kept_input(name) for name in self.sizes)
        if not self.copies and not self.dropout:  # q, k and v read one tensor, gate and up another; o reads what attention keeps
            each = self.out * sum(
                next((self.sizes[name][0] for name in group if name in self.sizes), 0) for group in (LINEARS[:3], GATE_UP, (DOWN,))
            )
        made = self.out * self.rank * len(self.sizes)
        return each + made + (2 * self.out * sum(o for _, o in self.sizes.values()) if self.dora else 0)

    def _kept_input(self, name: str) -> float:
        return self.sizes[name][0] * (self.out + (1 if self.dropout else 0))  # dropout's mask: a byte an element

    def weights(self) -> float:
        """The 16-bit copies of its own that autocast makes and keeps until the forward has ended."""
        return 2.0 * self.rank * sum(i + o for i, o in self.sizes.values()) if self.copies else 0.0

    def matrices(self) -> float:
        """What DoRA keeps that does not grow with tokens: with dropout it computes the base's output anew, with a weight cast twice."""
        return 2.0 * sum(i * o for i, o in self.sizes.values()) if self.dora and self.dropout and self.copies else 0.0

    def computing(self, name: str, tokens: int) -> float:
        """What is there while one adapted layer computes its output, beside what it saves."""
        inputs, outputs = self.sizes[name]
        read = inputs * (self.width * (1 + self.dropout) if self.copies else 0)  # its input in fp32, and what dropout leaves
        if not self.dora:
            return tokens * (read + 3 * self.out * outputs)  # the base's output, B's, and that scaled
        matrix = self.width * inputs * outputs
        eye = (2 if self.copies else self.width) * inputs * inputs  # the unit matrix that B A is made from, which the graph keeps
        whole = matrix * self.recast
        made = self.width * inputs * inputs * self.copies + eye + self.out * inputs * outputs
        normed = eye + 3 * matrix + whole  # B A, that scaled, and W with it
        at_end = eye + matrix + whole + 3 * self.width * tokens * outputs
        return tokens * read + max(made, normed, at_end)
