"""Count the bytes of a rank that trains: its state, and the tensors of each moment of a step.

Unless noted otherwise, fp32 elements have 4 bytes and 16-bit elements have 2.
docs/results/memory.md has measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launch.estimate import adapter_layers
from launch.estimate.activations import BYTES, SHARDED, MicroStep, Numerics, micro_step
from launch.estimate.batch_counts import Batch, batch, evaluation_batch, generation_batch
from launch.machine import placement
from launch.schema import Config, shapes
from launch.schema.enums import Head, Init, Reference, Vendor
from launch.schema.trainer_args import value, value_or_none

BUCKET = 500_000_000  # elements of ZeRO's gradient buffer: DeepSpeed's default reduce_bucket_size
# parameters of a rank that ZeRO-3 updates together: DeepSpeed's default sub_group_size
SUB_GROUP = 1_000_000_000
# Optimizer -> moments that it stores per parameter, in the parameter's dtype. Adafactor's sums of
# rows and columns are negligible (arXiv:1804.04235).
OPTIMIZERS = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
BITSANDBYTES_8_BIT = ("adamw_8bit", "adamw_bnb_8bit")
TORCHAO_8_BIT = "adamw_torch_8bit"  # 8-bit moments for parameters of 4,096 elements or more
# the parts of each moment of `_passes`, in order
PARTS = ("activations", "logits", "weights in 16 bits", "gradients", "communication")


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

    With an adapter there is no copy, because the base is the reference.
    """
    is_full = config.adapter.rank is None
    return is_full and uses_reference(config) and not precomputes_reference(config)


def generates_with_vllm(config: Config) -> bool:
    """Return whether vLLM generates the completions of a training run."""
    return config.topology.servers > 0 or config.topology.name == "colocate"


def generating_bytes(config: Config, rows: int) -> dict[str, float]:
    """Return the bytes for `rows` completions that transformers generates together, in parts.

    `logits` are three fp32 copies for one token per row: cast, processed, and as probabilities
    (GenerationMixin._sample).
    """
    token = config.model.num_kv_heads * shapes.head_bytes(config.model, width(config))
    cache = token * batch(config).sequence
    return {"kv cache": rows * cache, "logits": 12.0 * rows * config.model.vocab_size}


@dataclass(frozen=True)
class _Counts:
    """Numbers of weights, and bytes per weight, for the state of a rank."""

    base: int  # all weights of the model, without an adapter
    trained: int
    ranks: int  # number of ranks that train
    width: float  # bytes of a trained weight
    embedding: int  # elements of embedding or head, if it is trained; otherwise 0

    @classmethod
    def of(cls, config: Config) -> _Counts:
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


def optimizer_width(config: Config) -> float:
    """Return the bytes of a weight that the optimizer updates. DeepSpeed updates an fp32 copy."""
    return 4.0 if config.topology.strategy in ("zero2", "zero3") else _Counts.of(config).width


def state(config: Config) -> dict[str, float]:
    """Return the bytes that stay in memory between steps, in parts.

    Sharding follows arXiv:1910.02054. Adam has two moments in the dtype of a parameter. DeepSpeed
    has 16-bit weights, an fp32 copy of them ("master weights"), and the moments of the copy.
    """
    parts = _state(config)
    return {name: 0.0 if name in _offloaded(config) else size for name, size in parts.items()}


def checkpoint_bytes(config: Config) -> float:
    """Return the bytes of a checkpoint: trained weights and moments, and DeepSpeed's fp32 copy."""
    n, width_of_copy = _Counts.of(config), optimizer_width(config)
    copy = 4.0 if config.topology.strategy in ("zero2", "zero3") else 0.0
    moments = _optimizer_bytes(config, n, width_of_copy)
    if value_or_none(config, "save_only_model"):
        copy = moments = 0.0
    return (n.width + copy) * n.trained + moments


def run_bytes(config: Config) -> float:
    """Return the bytes of a training run's directory: its checkpoints and the model.

    While it saves, there is one checkpoint more than it keeps. A run that keeps all has two.
    """
    if not config.method.trains:
        return 0.0
    strategy = getattr(value := value_or_none(config, "save_strategy"), "value", value)
    kept = 0 if strategy == "no" else int(value_or_none(config, "save_total_limit") or 1) + 1
    return kept * checkpoint_bytes(config) + config.save_model * base_bytes(config)


def offloaded_bytes(config: Config) -> dict[str, float]:
    """Return the bytes of offloaded parts of all ranks of a node, in parts.

    An optimizer on the host also needs its gradients there (ZeRO-Offload, arXiv:2101.06840).
    """
    n, offloaded = _Counts.of(config), _offloaded(config)
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
    n, low = _Counts.of(config), width(config)
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


def preparation(config: Config) -> dict[str, dict[str, float]]:
    """Return the bytes of a rank at each moment before the first step, in parts.

    - "loading": every rank creates all random weights on its GPU. They are rounded to their compute
      dtype, one parameter at a time (recipes/models/model_build.py).
    - "sharding": accelerate 1.15's fsdp2_prepare_model has the complete model (`original_sd`) in
      memory until each parameter is sharded. 8B in fp32 with LoRA needed 49.4 GB there on each of
      two H200s, but 23 GB in training.
    - "measuring the reference": FSDP precomputes the log-probabilities of all rows.

    Weights in files are loaded on the CPU and moved one parameter at a time.
    """
    n, base = _Counts.of(config), base_bytes(config)
    by_rank = not config.model.path and not generates_with_vllm(config)
    is_random = config.model.init == Init.random and by_rank
    precomputes = config.topology.strategy == "fsdp" and precomputes_reference(config)
    measuring = {}
    if precomputes:
        rows = value_or_none(config, "precompute_ref_batch_size")
        size = batch(config)
        step = micro_step(config, replace(size, per_device=int(rows)) if rows else size)
        gathered = width(config) * n.base
        measuring["measuring the reference"] = {
            "weights": base if is_random else 0.0,
            "reference": 0.0 if config.topology.fsdp.cpu_offload else base / n.ranks,
            "reference in parameters": gathered,
            "reference as gathered": gathered,
            "activations": step.hidden + max(step.saved_by_layer(), step.before_head()),
            "logits": step.tile(),
        }
    if not is_random:
        return measuring
    rounds = BYTES[config.precision.weights] == 4 and config.precision.compute != "fp32"
    # the largest parameter, which has a 16-bit and an fp32 copy
    embedding = config.model.vocab_size * config.model.hidden_size
    loading = {
        "weights": base,
        "reference": base * (has_reference(config) or precomputes),
        "rounding": 6.0 * embedding * rounds,
    }
    peaks = {"loading": loading}
    if config.topology.strategy == "fsdp":
        trained = n.width * n.trained
        whole = trained + (base if config.adapter.rank is not None else 0.0)
        shards = {
            "weights": 0.0 if config.topology.fsdp.cpu_offload else whole / n.ranks,
            "whole weights": whole,
        }
        peaks["sharding"] = {**shards, "reference": state(config).get("reference", 0.0)}
    return {**peaks, **measuring}


def base_bytes(config: Config) -> float:
    """Return the bytes of the model's weights, without an adapter.

    nf4 packs only the linear layers. bitsandbytes leaves others, such as experts, in 16 bits.
    """
    model, width = config.model, BYTES[config.precision.weights]
    packed = 0
    if config.precision.weights == "nf4":
        packed = model.num_layers * shapes.separate_linear_parameters(model)
    return width * packed + max(2.0, width) * (model.num_parameters - packed)


def _optimizer_bytes(config: Config, n: _Counts, width: float) -> float:
    """Return the bytes of the optimizer's moments.

    Unknown optimizers are planned as AdamW. `uncounted` of launch/estimate/margin.py warns of it.
    """
    name = value(config, "optim")
    if name not in (*BITSANDBYTES_8_BIT, TORCHAO_8_BIT):
        return OPTIMIZERS.get(name, 2) * width * n.trained
    # Two moments of one byte, with scales. For embeddings, transformers uses fp32 moments.
    in_fp32 = 0 if name == TORCHAO_8_BIT else n.embedding
    return 2 * (1 + 4 / 256) * (n.trained - in_fp32) + 8.0 * in_fp32


def moments(config: Config) -> dict[str, dict[str, float]]:
    """Return the bytes in addition to the state, in parts, at each moment that may be the peak."""
    size, n, optim = batch(config), _Counts.of(config), value(config, "optim")
    step, shards = micro_step(config, size), _shards(config, size)
    passes = _passes(config, step, shards, size.accumulation > 1)
    peaks = {name: dict(zip(PARTS, sizes, strict=True)) for name, sizes in passes.items()}
    peaks["optimizer step"] = {
        "gradients": shards.gradients_of_step,
        "communication": shards.buffers_of_step,
    }
    if has_reference(config) and config.topology.strategy == "fsdp":
        # TRL shards the reference as one unit (trl.models.utils.prepare_fsdp). A forward gathers
        # all of it and splits it into parameters. torch frees the gathered buffer only when the
        # unit is gathered again (FSDPParamGroup.wait_for_unshard).
        gathered = width(config) * n.base
        forward = {**peaks["forward"], "reference in parameters": gathered}
        peaks["forward of the reference"] = forward
        for parts in peaks.values():
            parts["reference as gathered"] = gathered
    if optim == "adamw_torch":
        # torch's `foreach` step makes one more copy of all trained weights (docs.pytorch.org,
        # torch.optim.AdamW).
        peaks["optimizer step"]["optimizer's copies"] = state(config)["optimizer"] / 2
    if config.method.generates and not generates_with_vllm(config):
        parts = generating_bytes(config, generation_batch(config) // size.ranks)
        if config.adapter.rank is None:  # autocast keeps its copies of trained weights
            parts["weights in 16 bits"] = config.model.num_layers * step.linear_bytes()
        gathers = config.topology.strategy == "zero3" and value(config, "ds3_gather_for_generation")
        parts["communication"] = 2.0 * n.base if gathers else shards.buffers
        peaks["generation"] = parts
    return peaks


def _passes(
    config: Config, step: MicroStep, shards: _Shards, accumulates: bool
) -> dict[str, tuple[float, ...]]:
    """Return the bytes of forward, backward and evaluation, in the order of PARTS."""
    model, strategy, layers = config.model, config.topology.strategy, config.model.num_layers
    recomputed, hidden, one_layer = step.recomputing, step.hidden, step.saved_by_layer()
    saved = recomputed * hidden + (layers - recomputed) * one_layer
    copies = layers * step.linear_bytes()
    saved_copies = (layers - recomputed) * step.linear_bytes()
    last_copies = max(saved_copies, step.linear_bytes())
    # A compiled graph makes copies inside a layer and does not keep them.
    forward_copies = saved_copies if step.adapter or step.compiled else copies
    n, element = _Counts.of(config), step.numerics.hidden_bytes
    head_weights = float(n.embedding)
    head_gradient = n.width * head_weights
    # The gradient of a tied head is stored until the embedding's is added. The gradient of
    # an untied head is accumulated immediately.
    pending = element * head_weights if model.tied_embeddings else 0.0
    # Without accumulation there are no gradients at the start. But DeepSpeed's stage 3 allocates
    # them once (grad_partitions_flat_buffer).
    grads = shards.gradients if accumulates or strategy == "zero3" else 0.0
    # The gradient of the embedding needs a second tensor if the accumulated one exists or is
    # sharded.
    second = element * head_weights if grads or strategy in SHARDED else 0.0
    head = 0.0 if step.head is Head.summed else step.tile()
    head += (4 + (2 if step.numerics is Numerics.cast else 0)) * head_weights
    repeated = one_layer if recomputed else 0.0
    # Recomputed layers come first, so the last layer is one only if all are.
    last = saved + (repeated if recomputed == layers else 0.0) + step.backward_of_layer()
    first = (hidden if recomputed else one_layer) + repeated + step.backward_of_layer()
    first_copies = step.linear_bytes() if recomputed else copies
    last_grads = grads or (0.0 if model.tied_embeddings else head_gradient)
    is_pending = model.tied_embeddings and not grads
    first_grads = shards.gradients - (head_gradient if is_pending else 0.0)
    logits = step.tile() + step.head_gradient(head_weights)
    buffers, layer_buffers = shards.buffers, shards.buffers - shards.buffers_of_head
    end = layer_buffers + shards.gathered_again
    passes: dict[str, tuple[float, ...]] = {
        "forward": (saved + step.before_head(), logits, forward_copies, grads, buffers),
        "backward of the head": (saved + step.head_backward(), head, saved_copies, grads, buffers),
        "backward of the last layer": (last, pending, last_copies, last_grads, layer_buffers),
        "backward of the first layer": (first, pending, first_copies, first_grads, end),
        "backward of the embedding": (hidden, pending + second, 0.0, shards.gradients, end),
    }
    if config.method.selection.metric is not None:
        # without gradients, only the tensors of one layer or of the head are in memory
        held_out = micro_step(config, evaluation_batch(config))
        tensors = held_out.hidden + max(held_out.saved_by_layer(), held_out.before_head())
        passes["evaluation"] = (tensors, held_out.tile(), forward_copies, 0.0, buffers)
    return passes


@dataclass(frozen=True)
class _Shards:
    """Bytes of gradients and communication buffers, in the backward and in the optimizer step."""

    gradients: float
    buffers: float
    gradients_of_step: float
    buffers_of_step: float
    buffers_of_head: float = 0.0  # part of `buffers` that the backward of the head frees
    gathered_again: float = 0.0  # gathered again for the backward of the embedding


def _shards(config: Config, size: Batch) -> _Shards:
    """Count the gradients and buffers of the strategy.

    FSDP gathers a layer while it computes the previous one. While gradients accumulate, accelerate
    does not shard them. ZeRO moves gradients through a bucket into a partition in the compute
    dtype, which the optimizer step flattens and casts to fp32. Stage 3 does so for one sub-group at
    a time (_prepare_fp32_grad_for_sub_group), and gathers weights as FSDP does.
    """
    n, strategy, low = _Counts.of(config), config.topology.strategy, width(config)
    full, model, layers = n.width * n.trained, config.model, config.model.num_layers

    def gathered(num_layers: int) -> float:  # embedding, head and some layers
        layer = shapes.layer_parameters(model)
        return low * (n.base - layers * layer + min(num_layers, layers) * layer)

    if strategy == "fsdp":
        fsdp = config.topology.fsdp
        sharded = 0.0 if fsdp.cpu_offload else full / n.ranks
        # Accumulated gradients have the dtype of the reduction (torch's
        # FSDPParam.to_accumulated_grad_if_needed).
        element = 4.0 if fsdp.reduce_dtype == "fp32" else 2.0
        gradients = element * n.trained if size.accumulation > 1 else sharded
        buffers = gathered(2 if fsdp.reshard_after_forward else layers)
        if model.tied_embeddings:  # head and embedding are one unit, which is always gathered
            return _Shards(gradients, buffers, sharded, 0.0)
        matrix = low * model.vocab_size * model.hidden_size
        if not fsdp.reshard_after_forward:
            return _Shards(gradients, buffers, sharded, 0.0, matrix)
        # embedding and head are separate units
        return _Shards(gradients, buffers - matrix, sharded, 0.0, matrix, matrix)
    if strategy in ("zero2", "zero3"):
        part, flat = low * n.trained / n.ranks, 4.0 * n.trained / n.ranks
        bucket, buffer = low * min(BUCKET, n.trained), 0.0
        if config.topology.zero.offload_optimizer:
            # Buckets are copied to the host. temp_grad_buffer_for_gpu_offload of stage 2 has the
            # size of the largest parameter.
            part = flat = 0.0
            buffer = low * n.embedding
        if strategy == "zero2":
            return _Shards(part, bucket + buffer, 2 * part + flat, buffer)
        # flattened in 16 bits, then in fp32
        flattened = min(4.0 * SUB_GROUP, flat) * (1.5 if low == 2 else 1.0)
        return _Shards(part, 2 * bucket + gathered(2), part + flattened, bucket)
    buckets = bucket_bytes(config)  # in addition to the gradients
    return _Shards(full, buckets, full, buckets)


def bucket_bytes(config: Config) -> float:
    """Return the bytes of DDP's buckets, which exchange all gradients."""
    n = _Counts.of(config)
    is_ddp = config.topology.strategy == "ddp" and n.ranks > 1
    return n.width * n.trained if is_ddp else 0.0


def width(config: Config) -> float:
    """Return the bytes of a weight in matrix products."""
    return 4.0 if config.precision.compute == "fp32" else 2.0
