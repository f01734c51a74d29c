"""Count the bytes of a rank's state, which stay in memory between steps, and of what it saves.

Unless noted otherwise, fp32 elements have 4 bytes and 16-bit elements have 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.estimate import adapter_layers
from launch.estimate.activations import BYTES
from launch.estimate.run_length import num_saves
from launch.machine import placement
from launch.schema import Config, shapes
from launch.schema.enums import Reference, Vendor
from launch.schema.trainer_args import value, value_or_none

# Optimizer -> moments that it stores per parameter, in the parameter's dtype. Adafactor's sums of
# rows and columns are negligible (arXiv:1804.04235).
OPTIMIZERS = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
BITSANDBYTES_8_BIT = ("adamw_8bit", "adamw_bnb_8bit")
TORCHAO_8_BIT = "adamw_torch_8bit"  # 8-bit moments for parameters of 4,096 elements or more


def uses_reference(config: Config) -> bool:
    """Return whether the loss depends on a reference model: a copy, or the base of an adapter."""
    reference = config.method.reference
    return reference is Reference.always or (
        reference is Reference.beta and bool(value_or_none(config, "beta"))
    )


def precomputes_reference(config: Config) -> bool:
    """Return whether a frozen copy processes all rows before training starts."""
    precomputes = bool(value_or_none(config, "precompute_ref_log_probs"))
    return config.adapter.rank is None and uses_reference(config) and precomputes


def has_reference(config: Config) -> bool:
    """Return whether a frozen copy is in memory during training.

    An adapter needs no copy, because its base is the reference.
    """
    is_full = config.adapter.rank is None
    return is_full and uses_reference(config) and not precomputes_reference(config)


def generates_with_vllm(config: Config) -> bool:
    """Return whether vLLM generates the completions of a training run."""
    return config.topology.servers > 0 or config.topology.name == "colocate"


@dataclass(frozen=True)
class Counts:
    """Numbers of weights, and bytes per weight, for the state of a rank."""

    base: int  # all weights of the model, without an adapter
    trained: int
    ranks: int  # number of ranks that train
    width: float  # bytes of a trained weight
    embedding: int  # elements of embedding or head, if it is trained; otherwise 0

    @classmethod
    def of(cls, config: Config) -> Counts:
        model, ranks = config.model, placement.num_trainers(config)
        trained = adapter_layers.trainable_parameters(model, config.adapter)
        if config.adapter.rank is not None:
            # peft's weights are fp32. With nf4, TRL rounds them to bf16.
            width = 2.0 if config.precision.weights == "nf4" else 4.0
            return cls(model.num_parameters, trained, ranks, width, 0)
        width = 4.0 if upcasts_weights(config) else max(2.0, BYTES[config.precision.weights])
        embedding = model.vocab_size * model.hidden_size
        return cls(model.num_parameters, trained, ranks, width, embedding)


def upcasts_weights(config: Config) -> bool:
    """Return whether weights are loaded in 16 bits but trained in fp32.

    accelerate's fsdp2_prepare_model casts them under mixed precision.
    """
    return (
        config.topology.strategy == "fsdp"
        and config.precision.compute != "fp32"
        and BYTES[config.precision.weights] == 2
    )


def width(config: Config) -> float:
    """Return the bytes of a weight in matrix products."""
    return 4.0 if config.precision.compute == "fp32" else 2.0


def optimizer_width(config: Config) -> float:
    """Return the bytes of a weight that the optimizer updates. DeepSpeed updates an fp32 copy."""
    return 4.0 if config.topology.strategy in ("zero2", "zero3") else Counts.of(config).width


def base_bytes(config: Config) -> float:
    """Return the bytes of the model's weights, without an adapter.

    nf4 packs only the linear layers. bitsandbytes leaves others, such as experts, in 16 bits.
    """
    model, width = config.model, BYTES[config.precision.weights]
    packed = 0
    if config.precision.weights == "nf4":
        packed = model.num_layers * shapes.separate_linear_parameters(model)
    return width * packed + max(2.0, width) * (model.num_parameters - packed)


def state(config: Config) -> dict[str, float]:
    """Return the bytes that stay in memory between steps, in parts.

    Sharding follows arXiv:1910.02054. Adam has two moments in the dtype of a parameter. DeepSpeed
    has 16-bit weights, an fp32 copy of them ("master weights"), and the moments of the copy.
    """
    parts = _state(config)
    return {name: 0.0 if name in _offloaded(config) else size for name, size in parts.items()}


def checkpoint_bytes(config: Config) -> float:
    """Return the bytes of a checkpoint: trained weights and moments, and DeepSpeed's fp32 copy."""
    n, width_of_copy = Counts.of(config), optimizer_width(config)
    copy = 4.0 if config.topology.strategy in ("zero2", "zero3") else 0.0
    moments = _optimizer_bytes(config, n, width_of_copy)
    if value_or_none(config, "save_only_model"):
        copy = moments = 0.0
    return (n.width + copy) * n.trained + moments


def num_checkpoints(config: Config, prepared: Mapping[str, Any] | None = None) -> int:
    """Return the checkpoints that a run has while it saves: at most one more than it keeps.

    If the number of saves is unknown, a run that keeps all counts as one that keeps one.
    """
    limit, saves = value_or_none(config, "save_total_limit"), num_saves(config, prepared)
    if saves is None:
        return int(limit or 1) + 1
    return min(saves, int(limit) + 1) if limit else saves


def run_bytes(config: Config, prepared: Mapping[str, Any] | None = None) -> float:
    """Return the bytes of a training run's directory: its checkpoints and the model.

    `prepared` are the statistics of the prepared rows.
    """
    if not config.method.trains:
        return 0.0
    checkpoints = num_checkpoints(config, prepared) * checkpoint_bytes(config)
    return checkpoints + config.save_model * model_bytes(config)


def model_bytes(config: Config) -> float:
    """Return the bytes of the saved model; an adapter is saved, and merged into its base."""
    n, is_full = Counts.of(config), config.adapter.rank is None
    base = 0.0 if is_full else max(2.0, BYTES[config.precision.weights]) * n.base
    return base + n.width * n.trained


def offloaded_bytes(config: Config) -> dict[str, float]:
    """Return the bytes of offloaded parts of all ranks of a node, in parts.

    An optimizer on the host also needs its gradients there (ZeRO-Offload, arXiv:2101.06840).
    """
    n, offloaded = Counts.of(config), _offloaded(config)
    parts = {name: size for name, size in _state(config).items() if name in offloaded and size}
    if "optimizer" in offloaded:
        parts["gradients"] = optimizer_width(config) * n.trained / n.ranks
    return {name: placement.trainers_of_a_node(config) * size for name, size in parts.items()}


def _offloaded(config: Config) -> set[str]:
    """Return the parts of the state that the host stores."""
    fsdp, zero = config.topology.fsdp.cpu_offload, config.topology.zero
    weights = ("weights", "adapter", "reference") if fsdp or zero.offload_parameters else ()
    optimizer = ("optimizer", "master weights") if fsdp or zero.offload_optimizer else ()
    return {*weights, *optimizer}


def _state(config: Config) -> dict[str, float]:
    n, low = Counts.of(config), width(config)
    shared = n.ranks if config.topology.strategy in ("fsdp", "zero3") else 1
    adapter = n.trained if config.adapter.rank is not None else 0
    base = base_bytes(config)
    parts = {"weights": base / shared, "adapter": n.width * adapter / shared}
    if upcasts_weights(config) and config.adapter.rank is None:
        parts["weights"] = 4.0 * n.base / shared
    parts["optimizer"] = _optimizer_bytes(config, n, n.width) / shared
    if config.topology.strategy in ("zero2", "zero3"):
        parts |= {"weights": min(low * n.base, base) / shared, "adapter": low * adapter / shared}
        parts["master weights"] = 4.0 * n.trained / n.ranks
        parts["optimizer"] = _optimizer_bytes(config, n, 4.0) / n.ranks
    if has_reference(config):
        # TRL applies the strategy to the reference too. FSDP2 shards it in the dtype that it
        # was loaded.
        is_fsdp = config.topology.strategy == "fsdp"
        parts["reference"] = base / shared if is_fsdp else parts["weights"]
    overlaps = config.topology.overlap and config.topology.strategy in ("none", "ddp")
    if overlaps and config.hardware.vendor != Vendor.none:
        # During the step (recipes/sampling/overlap.py), vLLM packs tensors into two buffers until
        # each exceeds 1 GiB.
        largest = config.model.vocab_size * config.model.hidden_size * base / n.base
        parts["weights being sent"] = min(base, 2.0 * 2**30 + largest)
    return parts


def _optimizer_bytes(config: Config, n: Counts, width: float) -> float:
    """Return the bytes of the optimizer's moments.

    Unknown optimizers are planned as AdamW. `uncounted` of launch/estimate/margin.py warns of it.
    """
    name = value(config, "optim")
    if name not in (*BITSANDBYTES_8_BIT, TORCHAO_8_BIT):
        return OPTIMIZERS.get(name, 2) * width * n.trained
    # Two moments of one byte, with scales. For embeddings, transformers uses fp32 moments.
    in_fp32 = 0 if name == TORCHAO_8_BIT else n.embedding
    return 2 * (1 + 4 / 256) * (n.trained - in_fp32) + 8.0 * in_fp32
