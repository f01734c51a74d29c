"""Count the memory traffic and the number of kernels of a micro-step, apart from products."""

from __future__ import annotations

import operator
from typing import NamedTuple

from launch.estimate.activations import MicroStep, Numerics
from launch.schema import Config, shapes
from launch.schema.trainer_args import value_or_none

# bytes moved per weight to cast it to 16 bits and its gradient back, with and without
# checkpointing; counted like TRAFFIC
WEIGHT_BYTES = {
    Numerics.autocast: (18.0, 12.0),
    Numerics.cast: (0.0, 0.0),
    Numerics.fp32: (0.0, 0.0),
}
# the same with an adapter, when the copies of frozen weights are not kept
FROZEN_BYTES = {
    Numerics.autocast: (13.5, 7.0),
    Numerics.cast: (1.5, 1.0),
    Numerics.fp32: (0.0, 0.0),
}
# share of Traffic.heads in models without norms of query and key, such as llama
WITHOUT_HEAD_NORMS = 0.31


class Traffic(NamedTuple):
    """Traffic of the memory-bound kernels of one layer, in bytes per token and unit of width.

    It was counted on fake tensors with the Qwen3 of transformers 5.17. It includes norms,
    rotations, casts, residuals, the activation function, and their backward.
    """

    hidden: float  # per unit of the hidden size
    wide: float  # per unit of the intermediate size
    heads: float  # per unit of query and key size
    kernels: float  # number of kernels

    def plus(self, other: Traffic) -> Traffic:
        return Traffic._make(map(operator.add, self, other))

    def times(self, factor: float, kernel_factor: float) -> Traffic:
        *moved, kernels = self
        return Traffic._make([*(factor * each for each in moved), kernel_factor * kernels])


TRAFFIC = {  # by numerics and gradient checkpointing
    (Numerics.autocast, True): Traffic(558, 38, 347, 254),
    (Numerics.autocast, False): Traffic(462, 28, 262, 192),
    (Numerics.cast, True): Traffic(442, 38, 241, 220),
    (Numerics.cast, False): Traffic(364, 28, 184, 168),
    (Numerics.fp32, True): Traffic(455, 76, 297, 196),
    (Numerics.fp32, False): Traffic(364, 56, 220, 150),
}
# with the LoRA of peft 0.21, which casts inputs to fp32, scales products and adds them
TRAFFIC_OF_ADAPTERS = {
    (Numerics.autocast, True): Traffic(652, 128, 397, 386),
    (Numerics.autocast, False): Traffic(516, 86, 290, 275),
    (Numerics.cast, True): Traffic(616, 128, 297, 374),
    (Numerics.cast, False): Traffic(468, 86, 218, 268),
}
# Compiled by inductor and counted by hand. Each chain of operations between two products is one
# kernel, which reads its inputs once and writes its outputs once. tests/gpu/test_measured_steps.py
# compares the result with measurements.
COMPILED = {
    (Numerics.autocast, True): Traffic(102, 22, 18, 80),
    (Numerics.autocast, False): Traffic(74, 16, 12, 60),
    (Numerics.cast, True): Traffic(62, 22, 16, 56),
    (Numerics.cast, False): Traffic(44, 16, 12, 42),
    (Numerics.fp32, True): Traffic(112, 44, 32, 56),
    (Numerics.fp32, False): Traffic(84, 32, 24, 42),
}
# In addition with an adapter: A and B each add 6 bytes to the output of a product and to the
# gradient of its input.
COMPILED_ADAPTERS = {True: Traffic(54, 30, 12, 60), False: Traffic(42, 18, 6, 40)}
# In addition with fp8: two reads and a write of each operand, to scale and cast it.
COMPILED_FP8 = Traffic(30, 20, 10, 38)
# With Liger's kernels: shares of the eager traffic, without and with adapters, and of the eager
# kernels. They come from the rows of tests/gpu/test_measured_steps.py.
LIGER, LIGER_OF_ADAPTERS, LIGER_KERNELS = 0.26, 0.55, 0.5


def _layer_traffic(config: Config, step: MicroStep, recomputes: bool) -> Traffic:
    """Return the traffic of one layer. `recomputes`: the backward repeats its forward."""
    adapter, numerics = config.adapter.rank is not None, step.numerics
    if step.compiled:
        fused = COMPILED[numerics, recomputes]
        fused = fused.plus(COMPILED_ADAPTERS[recomputes]) if adapter else fused
        return fused.plus(COMPILED_FP8) if config.precision.compute == "fp8" else fused
    eager = (TRAFFIC_OF_ADAPTERS if adapter and numerics is not Numerics.fp32 else TRAFFIC)[
        numerics, recomputes
    ]
    if not value_or_none(config, "use_liger_kernel"):
        return eager
    return eager.times(LIGER_OF_ADAPTERS if adapter else LIGER, LIGER_KERNELS)


def traffic(
    config: Config, step: MicroStep, linear: float, forwards: float
) -> tuple[float, float, float]:
    """Return the bytes moved per micro-step for tokens and for weights, and the number of kernels.

    `linear` is the number of weights in linear layers, `forwards` the number of additional forwards
    without gradients.
    """
    model, (hidden, wide, query, key) = config.model, step.widths
    adapter = config.adapter.rank is not None
    share = step.recomputed_share
    layer = (
        _layer_traffic(config, step, True)
        .times(share, share)
        .plus(_layer_traffic(config, step, False).times(1 - share, 1 - share))
    )
    heads = layer.heads * (1.0 if shapes.normalizes_heads(model) else WITHOUT_HEAD_NORMS)
    per_token = layer.hidden * hidden + layer.wide * wide + heads * (query + key)
    scores = 12 * step.score_bytes() * (1 + share)  # unfused attention moves them repeatedly
    with_checkpoints, without = (FROZEN_BYTES if adapter else WEIGHT_BYTES)[step.numerics]
    per_weight = share * with_checkpoints + (1 - share) * without
    weights = per_weight * (linear + (0 if adapter else model.vocab_size * hidden))
    # A forward is a fifth of forward, recomputation and backward together.
    factor = 1 + 0.2 * forwards
    moved = model.num_layers * (step.tokens * per_token + scores)
    return factor * moved, factor * weights, factor * model.num_layers * layer.kernels
