"""Count what a layer's memory-bound kernels move, and how many kernels a micro-step starts."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from launch.estimate.activations import MicroStep, Numerics
from launch.schema import Config
from launch.schema.trainer_args import argument

# Bytes moved per weight to copy it to 16 bits (autocast) and return its gradient, with and without
# checkpointing. Counted like TRAFFIC.
WEIGHT_BYTES = {
    Numerics.autocast: (18.0, 12.0),
    Numerics.cast: (0.0, 0.0),
    Numerics.fp32: (0.0, 0.0),
}
FROZEN_BYTES = {
    Numerics.autocast: (13.5, 7.0),
    Numerics.cast: (1.5, 1.0),
    Numerics.fp32: (0.0, 0.0),
}  # with adapters: not kept
# share of the heads' traffic without norms of query and key (qwen2, llama)
WITHOUT_HEAD_NORMS = 0.31


@dataclass(frozen=True)
class Traffic:
    """Traffic of one layer's memory-bound kernels: bytes per token and unit of width, and kernels.

    Counted on fake tensors over transformers 5.17's Qwen3: norms, rotations, casts, residuals, the
    activation, and their backward.
    """

    hidden: float
    wide: float
    heads: float  # per unit of query and key width
    kernels: float

    def plus(self, more: Traffic) -> Traffic:
        sums = (a + b for a, b in zip(astuple(self), astuple(more), strict=True))
        return Traffic(*sums)

    def times(self, share: float, of_kernels: float) -> Traffic:
        hidden, wide, heads, kernels = astuple(self)
        return Traffic(share * hidden, share * wide, share * heads, of_kernels * kernels)


TRAFFIC = {  # by numerics and gradient checkpointing
    (Numerics.autocast, True): Traffic(558, 38, 347, 254),
    (Numerics.autocast, False): Traffic(462, 28, 262, 192),
    (Numerics.cast, True): Traffic(442, 38, 241, 220),
    (Numerics.cast, False): Traffic(364, 28, 184, 168),
    (Numerics.fp32, True): Traffic(455, 76, 297, 196),
    (Numerics.fp32, False): Traffic(364, 56, 220, 150),
}
# with LoRA in peft 0.21, which casts inputs to fp32, and scales and adds products
TRAFFIC_OF_ADAPTERS = {
    (Numerics.autocast, True): Traffic(652, 128, 397, 386),
    (Numerics.autocast, False): Traffic(516, 86, 290, 275),
    (Numerics.cast, True): Traffic(616, 128, 297, 374),
    (Numerics.cast, False): Traffic(468, 86, 218, 268),
}
# With inductor, counted by hand: each chain of such operations between two products is one kernel,
# which reads its inputs once and writes its outputs once. tests/gpu/test_measured_steps.py compares
# the result with measurements.
COMPILED = {
    (Numerics.autocast, True): Traffic(102, 22, 18, 80),
    (Numerics.autocast, False): Traffic(74, 16, 12, 60),
    (Numerics.cast, True): Traffic(62, 22, 16, 56),
    (Numerics.cast, False): Traffic(44, 16, 12, 42),
    (Numerics.fp32, True): Traffic(112, 44, 32, 56),
    (Numerics.fp32, False): Traffic(84, 32, 24, 42),
}
# With a frozen base: the 6 bytes each that A and B add to a product's output and to its input's
# gradient.
COMPILED_ADAPTERS = {True: Traffic(54, 30, 12, 60), False: Traffic(42, 18, 6, 40)}
# Scales and casts for fp8 products: two reads and a write of each operand.
COMPILED_FP8 = Traffic(30, 20, 10, 38)
# Liger's kernels for norms, rotation and activation: shares of the eager traffic, read off the rows
# of tests/gpu/test_measured_steps.py, and of the eager kernels.
LIGER, LIGER_OF_ADAPTERS, LIGER_KERNELS = 0.26, 0.55, 0.5


def _of_layer(config: Config, step: MicroStep, recomputes: bool) -> Traffic:
    """Return one layer's traffic; `recomputes` if the backward runs its forward again."""
    adapter, numerics = config.adapter.rank is not None, step.numerics
    if step.compiled:
        fused = COMPILED[numerics, recomputes]
        fused = fused.plus(COMPILED_ADAPTERS[recomputes]) if adapter else fused
        return fused.plus(COMPILED_FP8) if config.precision.compute == "fp8" else fused
    eager = (TRAFFIC_OF_ADAPTERS if adapter and numerics is not Numerics.fp32 else TRAFFIC)[
        numerics, recomputes
    ]
    if not argument(config, "use_liger_kernel"):
        return eager
    return eager.times(LIGER_OF_ADAPTERS if adapter else LIGER, LIGER_KERNELS)


def traffic(
    config: Config, step: MicroStep, linear: float, forwards: float
) -> tuple[float, float, float]:
    """Return bytes that a micro-step moves for tokens and for weights, and its kernel launches.

    `linear` counts the weights of all layers, `forwards` those without gradients.
    """
    model, (hidden, wide, query, key) = config.model, step.widths
    adapter = config.adapter.rank is not None
    again = step.recomputed_share
    of_layer = (
        _of_layer(config, step, True)
        .times(again, again)
        .plus(_of_layer(config, step, False).times(1 - again, 1 - again))
    )
    heads = of_layer.heads * (1.0 if model.architecture == "qwen3" else WITHOUT_HEAD_NORMS)
    per_token = of_layer.hidden * hidden + of_layer.wide * wide + heads * (query + key)
    scores = 12 * step.scores() * (1 + again)  # unfused attention reads and writes them repeatedly
    recomputed, kept = (FROZEN_BYTES if adapter else WEIGHT_BYTES)[step.numerics]
    per_weight = again * recomputed + (1 - again) * kept
    weights = per_weight * (linear + (0 if adapter else model.vocab_size * hidden))
    # a forward is a fifth of forward, recomputation and backward
    more = 1 + 0.2 * forwards
    moved = model.num_layers * (step.tokens * per_token + scores)
    return more * moved, more * weights, more * model.num_layers * of_layer.kernels
