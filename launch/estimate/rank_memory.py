"""Count the tensors of a rank at each moment of a training step, in bytes.

Unless noted otherwise, fp32 elements have 4 bytes and 16-bit elements have 2.
docs/results/memory.md has measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launch.estimate.activations import BYTES, SHARDED, MicroStep, Numerics, micro_step
from launch.estimate.batch_counts import Batch, batch, evaluation_batch, generation_batch
from launch.estimate.rank_state import (
    Counts,
    base_bytes,
    generates_with_vllm,
    has_reference,
    precomputes_reference,
    state,
    width,
)
from launch.schema import Config, shapes
from launch.schema.enums import Head, Init
from launch.schema.trainer_args import value, value_or_none

BUCKET = 500_000_000  # elements of ZeRO's gradient buffer: DeepSpeed's default reduce_bucket_size
# parameters of a rank that ZeRO-3 updates together: DeepSpeed's default sub_group_size
SUB_GROUP = 1_000_000_000
# the parts of each moment of `_passes`, in order
PARTS = ("activations", "logits", "weights in 16 bits", "gradients", "communication")


def generating_bytes(config: Config, rows: int) -> dict[str, float]:
    """Return the bytes for `rows` completions that transformers generates together, in parts.

    `logits` are three fp32 copies for one token per row: cast, processed, and as probabilities
    (GenerationMixin._sample).
    """
    token = config.model.num_kv_heads * shapes.head_bytes(config.model, width(config))
    cache = token * batch(config).sequence
    return {"keys and values": rows * cache, "logits": 12.0 * rows * config.model.vocab_size}


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
    n, base = Counts.of(config), base_bytes(config)
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


def moments(config: Config) -> dict[str, dict[str, float]]:
    """Return the bytes in addition to the state, in parts, at each moment that may be the peak."""
    size, n, optim = batch(config), Counts.of(config), value(config, "optim")
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
        parts["gradients"] = shards.between_steps
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
    n, element = Counts.of(config), step.numerics.hidden_bytes
    head_weights = float(n.embedding)
    head_gradient = n.width * head_weights
    # The gradient of a tied head is stored until the embedding's is added. The gradient of
    # an untied head is accumulated immediately.
    pending = element * head_weights if model.tied_embeddings else 0.0
    # Without accumulation there are no gradients at the start. But DeepSpeed's stage 3 allocates
    # them once (grad_partitions_flat_buffer).
    grads = shards.gradients if accumulates or strategy == "zero3" else shards.between_steps
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
        kept = shards.between_steps
        passes["evaluation"] = (tensors, held_out.tile(), forward_copies, kept, buffers)
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
    between_steps: float = 0.0  # gradients that are never freed


def _shards(config: Config, size: Batch) -> _Shards:
    """Count the gradients and buffers of the strategy.

    FSDP gathers a layer while it computes the previous one. While gradients accumulate, accelerate
    does not shard them. ZeRO moves gradients through a bucket into a partition in the compute
    dtype, which the optimizer step flattens and casts to fp32. Stage 3 does so for one sub-group at
    a time (_prepare_fp32_grad_for_sub_group), and gathers weights as FSDP does.
    """
    n, strategy, low = Counts.of(config), config.topology.strategy, width(config)
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
            freed = matrix if size.accumulation == 1 else 0.0
            return _Shards(gradients, buffers, sharded, 0.0, freed)
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
    # DDP's buckets exist from the start.
    kept = full if strategy == "ddp" and n.ranks > 1 else 0.0
    return _Shards(full, 0.0, full, 0.0, between_steps=kept)
