"""A first estimate of memory and speed from shapes alone. Round figures are named as such; nothing here was fitted."""

from __future__ import annotations

from dataclasses import dataclass

from launch import shapes, topology
from launch.batch import Batch, batch
from launch.schema import Config, Vendor
from launch.trainer_args import known, value

BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "nf4": 0.5625}  # nf4: 4 bits and an fp32 scale for 64 weights (arXiv:2305.14314)
OVERHEAD_GB = 2.0  # context, allocator and libraries of one GPU process: a round figure, measured in none of our runs yet
SERVER_SHARE = 0.9  # gpu_memory_utilization of vLLM unless given
ASSUMED_MFU = 0.3  # share of the dense peak that TRL's trainers are assumed to reach
ASSUMED_BANDWIDTH = 0.6  # share of the memory bandwidth that decoding is assumed to reach
SERVER_SEQUENCES = 256  # completions that one server decodes at once (vLLM's max_num_seqs)


@dataclass(frozen=True)
class Memory:
    process: str
    gpu: int | None  # None: the host's memory
    parts_gb: dict[str, float]
    capacity_gb: float

    @property
    def total_gb(self) -> float:
        return sum(self.parts_gb.values())

    @property
    def fits(self) -> bool:
        return self.total_gb <= self.capacity_gb + 1e-6  # a server fills what it has, by sums of floats


@dataclass(frozen=True)
class Speed:
    """`None` where nothing can be said; `basis` says what the figures rest on."""

    tokens_per_second: float | None
    step_s: float | None
    basis: str


def memory(config: Config, processes: list[topology.Process]) -> list[Memory]:
    """One entry for each process and GPU."""
    capacity = config.hardware.memory_gb
    found = []
    for process in processes:
        if process.kind == "prepare":  # over before the others begin
            continue
        serves = process.kind == "server"
        parts = _server_parts(config) if serves else _rank_parts(config)
        # A server keeps to its share: weights that outgrow it do not fit, however much memory is left beside it.
        most = config.topology.server_memory_share * capacity if serves else capacity
        devices: list[int | None] = [*process.gpus] or [None]
        found += [Memory(process.name, gpu, parts, most) for gpu in devices]
    return found


def _server_parts(config: Config) -> dict[str, float]:
    """vLLM fills its share of the GPU: what the weights leave is the cache of keys and values."""
    weights = (
        (4.0 if config.precision.compute == "fp32" else 2.0) * config.model.num_parameters / config.topology.server_tensor_parallel / 1e9
    )
    room = config.topology.server_memory_share * config.hardware.memory_gb - OVERHEAD_GB - weights
    return {"weights": weights, "kv cache": max(0.0, room), "context": OVERHEAD_GB}


def _rank_parts(config: Config) -> dict[str, float]:
    """One rank. Sharding after arXiv:1910.02054: zero2 splits gradients and optimizer, zero3 and fsdp the weights too."""
    if config.method.kind != "trainer":
        kept = BYTES[config.precision.weights] * config.model.num_parameters / 1e9
        return {"weights": kept, "context": _overhead(config)}
    ranks, strategy = topology.num_trainers(config), config.topology.strategy
    train = shapes.trainable_parameters(config.model, config.adapter)
    base = BYTES[config.precision.weights]
    trained = BYTES["bf16"] if config.precision.weights == "bf16" and config.adapter.rank is None else 4.0
    weights = base * config.model.num_parameters + (4.0 * train if config.adapter.rank is not None else 0)
    parts = {
        "weights": weights / (ranks if strategy in ("fsdp", "zero3") else 1),
        "gradients": trained * train / (ranks if strategy in ("fsdp", "zero2", "zero3") else 1),
        "optimizer": 2 * trained * train / (ranks if strategy in ("fsdp", "zero2", "zero3") else 1),
        "reference": base * config.model.num_parameters if _has_reference(config) else 0.0,
        "activations": _activations(config, batch(config)),
        "logits": _logits(config, batch(config)),
    }
    found = {name: size / 1e9 for name, size in parts.items() if size} | {"context": _overhead(config)}
    if config.topology.name == "colocate":
        found["vllm"] = float(value(config, "vllm_gpu_memory_utilization")) * config.hardware.memory_gb
    return found


def _overhead(config: Config) -> float:
    return 0.5 if config.hardware.vendor == Vendor.none else OVERHEAD_GB


def _has_reference(config: Config) -> bool:
    """DPO compares with the start; GRPO only where beta is not 0. With an adapter the base serves as reference."""
    if config.adapter.rank is not None:
        return False
    return config.method.name == "dpo" or (config.method.name == "grpo" and bool(value(config, "beta")))


def _activations(config: Config, size: Batch) -> float:
    """Bytes: 34 a token, layer and unit of width in 16 bit (arXiv:2205.05198, equation 2, without the scores that fused
    attention never stores); with checkpointing 2 of them, and one layer in full."""
    double = 2.0 if config.precision.compute == "fp32" else 1.0
    pairs = 2 if config.method.name == "dpo" else 1  # chosen and rejected go through together
    tokens = size.per_device * size.sequence * pairs
    one_layer = 34.0 * tokens * config.model.hidden_size * double
    if value(config, "gradient_checkpointing"):
        return one_layer + 2.0 * tokens * config.model.hidden_size * config.model.num_layers * double
    return one_layer * config.model.num_layers


def _logits(config: Config, size: Batch) -> float:
    """Bytes of one chunk of 1024 tokens in fp32, and its gradient: TRL's loss never holds all of them."""
    return 2 * 4.0 * min(size.per_device * size.sequence, 1024) * config.model.vocab_size


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
