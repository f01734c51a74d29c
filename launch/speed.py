"""A first estimate of speed: shares of a GPU's peak and bandwidth that are assumed, and named as such."""

from __future__ import annotations

from dataclasses import dataclass

from launch import shapes
from launch.batch import Batch, batch
from launch.schema import Config
from launch.trainer_args import known, value

ASSUMED_MFU = 0.3  # share of the dense peak that TRL's trainers are assumed to reach
ASSUMED_BANDWIDTH = 0.6  # share of the memory bandwidth that decoding is assumed to reach
SERVER_SEQUENCES = 256  # completions that one server decodes at once (vLLM's max_num_seqs)


@dataclass(frozen=True)
class Speed:
    """`None` where nothing can be said; `basis` says what the figures rest on."""

    tokens_per_second: float | None
    step_s: float | None
    basis: str


def speed(config: Config) -> Speed:
    """Tokens a second of the whole run, and seconds a step."""
    peak = config.hardware.peak_tflops.get(config.precision.compute)
    if peak is None:
        return Speed(None, None, f"no peak of {config.hardware.name} in {config.precision.compute} is known")
    if config.method.kind != "trainer":
        return Speed(None, None, f"no estimate for {config.method.name} yet")
    size = batch(config)
    recomputes = bool("gradient_checkpointing" in known(config) and value(config, "gradient_checkpointing"))
    flops = shapes.flops_per_token(config.model, size.sequence, config.adapter.rank is None, recomputes)
    pairs = 2 if config.method.name == "dpo" else 1
    train_s = flops * size.tokens * pairs / size.ranks / (ASSUMED_MFU * peak * 1e12)
    generate_s = _generation_s(config, size)
    step_s = train_s + generate_s
    basis = f"assumed, not measured: {ASSUMED_MFU:.0%} of the {config.precision.compute} peak"
    if generate_s:
        basis += f", generation at {ASSUMED_BANDWIDTH:.0%} of the memory bandwidth ({generate_s / step_s:.0%} of the step)"
    return Speed(size.tokens * pairs / step_s, step_s, basis)


def _generation_s(config: Config, size: Batch) -> float:
    """Seconds to decode the completions of one step: every token reads all weights once for a batch of sequences."""
    if not size.completion:
        return 0.0
    read_s = 2.0 * config.model.num_parameters / (ASSUMED_BANDWIDTH * config.hardware.bandwidth_gb_s * 1e9)
    engines = max(1, config.topology.servers) if config.topology.servers else size.ranks
    waves = max(1.0, size.sequences / engines / SERVER_SEQUENCES)
    passes = int(value(config, "num_iterations") or 1)  # one generation serves several
    return read_s / config.topology.server_tensor_parallel * size.completion * waves / passes
