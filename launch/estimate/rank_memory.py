"""Count the bytes of a rank that trains: its state, and what each moment of a step adds.

Unless noted otherwise, a part follows from dtype and count: 4 bytes per fp32 element, 2 per 16-bit
element. docs/results/memory.md has measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launch.estimate import adapted
from launch.estimate.activations import BYTES, SHARDED, MicroStep, Numerics, micro_step
from launch.estimate.batch_counts import Batch, batch, evaluation_batch, generation_batch
from launch.machine import placement
from launch.schema import Config, shapes
from launch.schema.enums import Head, Init, Reference, Vendor
from launch.schema.trainer_args import argument, value

BUCKET = 500_000_000  # elements of ZeRO's gradient buffer: DeepSpeed's default reduce_bucket_size
# parameters of a rank that ZeRO-3 steps at once: DeepSpeed's default sub_group_size
SUB_GROUP = 1_000_000_000
# Number of moments in the parameter's dtype, by optim. Adafactor keeps sums of rows and columns,
# almost nothing (arXiv:1804.04235).
OPTIMIZERS = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
IN_8_BITS = ("adamw_8bit", "adamw_bnb_8bit")  # bitsandbytes
OF_TORCHAO = "adamw_torch_8bit"  # rounds the moments of every parameter of 4,096 elements or more
# The order of sizes in a moment of `_passes`.
PARTS = ("activations", "logits", "weights in 16 bits", "gradients", "communication")


def compares(config: Config) -> bool:
    """Return whether the loss compares with a reference, whichever model serves as it."""
    reference = config.method.reference
    return reference is Reference.always or (
        reference is Reference.beta and bool(argument(config, "beta"))
    )


def measures_beforehand(config: Config) -> bool:
    """Return whether a frozen copy sees all rows before training starts."""
    precomputes = bool(argument(config, "precompute_ref_log_probs"))
    return config.adapter.rank is None and compares(config) and precomputes


def has_reference(config: Config) -> bool:
    """Return whether a frozen copy is in memory while the run trains.

    With an adapter, the base serves as reference, so there is no copy.
    """
    whole = config.adapter.rank is None
    return whole and compares(config) and not measures_beforehand(config)


def generates_with_vllm(config: Config) -> bool:
    return config.topology.servers > 0 or config.topology.name == "colocate"


def generating_bytes(config: Config, rows: int) -> dict[str, float]:
    """Return bytes of generating `rows` completions under transformers.

    These are keys and values of every layer, and three fp32 copies of a token's logits (cast,
    processed, probabilities: GenerationMixin._sample).
    """
    token = config.model.num_kv_heads * shapes.head_bytes(config.model, width(config))
    cache = token * batch(config).sequence
    return {"kv cache": rows * cache, "logits": 12.0 * rows * config.model.vocab_size}


@dataclass(frozen=True)
class _Counts:
    """Numbers of elements, and bytes per element, that make up the state of a rank."""

    base: int  # all weights of the model
    trained: int
    ranks: int  # the ranks among which the strategy shards
    width: float  # bytes of a trained weight
    embedding: int  # the largest trained parameter, embedding or head; 0 with an adapter

    @classmethod
    def of(cls, config: Config) -> _Counts:
        train = adapted.trainable_parameters(config.model, config.adapter)
        # peft's weights are fp32; with nf4, TRL rounds them to bf16
        adapter = 2.0 if config.precision.weights == "nf4" else 4.0
        own = 4.0 if makes_fp32(config) else max(2.0, BYTES[config.precision.weights])
        whole, model = config.adapter.rank is None, config.model
        embedding = model.vocab_size * model.hidden_size if whole else 0
        ranks = placement.num_trainers(config)
        return cls(model.num_parameters, train, ranks, own if whole else adapter, embedding)


def makes_fp32(config: Config) -> bool:
    """Return whether weights loaded in 16 bits train in fp32.

    accelerate's fsdp2_prepare_model casts them under mixed precision.
    """
    return (
        config.topology.strategy == "fsdp"
        and config.precision.compute != "fp32"
        and BYTES[config.precision.weights] == 2
    )


def stepped_bytes(config: Config) -> float:
    """Return bytes of a weight as the optimizer steps it; DeepSpeed keeps an fp32 copy."""
    return 4.0 if config.topology.strategy in ("zero2", "zero3") else _Counts.of(config).width


def state(config: Config) -> dict[str, float]:
    """Return bytes that stay from step to step, in parts.

    Sharding follows arXiv:1910.02054; Adam keeps two moments in a parameter's dtype.

    DeepSpeed holds 16-bit weights, an fp32 copy of them, and that copy's moments.
    """
    n, zero, low = _Counts.of(config), config.topology.zero, width(config)
    shared = n.ranks if config.topology.strategy in ("fsdp", "zero3") else 1
    adapter = n.trained if config.adapter.rank is not None else 0
    base = base_bytes(config)
    parts = {"weights": base / shared, "adapter": n.width * adapter / shared}
    if makes_fp32(config) and config.adapter.rank is None:
        parts["weights"] = 4.0 * n.base / shared
    parts["optimizer"] = _optimizer_bytes(config, n, n.width) / shared
    if config.topology.strategy in ("zero2", "zero3"):
        parts |= {"weights": min(low * n.base, base) / shared, "adapter": low * adapter / shared}
        parts["master weights"] = 4.0 * n.trained / n.ranks
        parts["optimizer"] = _optimizer_bytes(config, n, 4.0) / n.ranks
        if zero.offload_optimizer:
            parts |= {"optimizer": 0.0, "master weights": 0.0}
    if has_reference(config):
        # TRL also gives the reference to the strategy: whole under ZeRO-2, as loaded under FSDP2.
        is_fsdp = config.topology.strategy == "fsdp"
        parts["reference"] = base / shared if is_fsdp else parts["weights"]
    sends_beside = config.topology.overlap and config.topology.strategy in ("none", "ddp")
    if sends_beside and config.hardware.vendor != Vendor.none:
        # While the step continues (recipes/sampling/overlap.py), vLLM packs tensors into two
        # buffers until each exceeds 1 GiB.
        largest = config.model.vocab_size * config.model.hidden_size * base / n.base
        parts["weights being sent"] = min(base, 2.0 * 2**30 + largest)
    if config.topology.fsdp.cpu_offload or zero.offload_parameters:
        parts |= {"weights": 0.0, "adapter": 0.0, "reference": 0.0}
    if config.topology.fsdp.cpu_offload:
        parts["optimizer"] = 0.0
    return parts


def preparation(config: Config) -> dict[str, dict[str, float]]:
    """Return bytes of a rank before the first step, in parts.

    Random weights are drawn on its GPU, all of them on every rank.

    "loading": weights are rounded to their compute dtype, one parameter at a time
    (recipes/models/model_build.py). "sharding": accelerate 1.15's fsdp2_prepare_model holds the
    whole model (`original_sd`) until each parameter has its shard. 8B in fp32 with LoRA took 49.4
    GB there on each of two H200s, and trains in 23. Weights from files come from the CPU, one
    parameter at a time.
    """
    n, base = _Counts.of(config), base_bytes(config)
    by_rank = not config.model.path and not generates_with_vllm(config)
    drawn = config.model.init == Init.random and by_rank
    beforehand = config.topology.strategy == "fsdp" and measures_beforehand(config)
    measuring = {}
    if beforehand:  # FSDP's reference forward over all rows, before sharding
        rows = argument(config, "precompute_ref_batch_size")
        size = batch(config)
        step = micro_step(config, replace(size, per_device=int(rows)) if rows else size)
        gathered = width(config) * n.base
        measuring["measuring the reference"] = {
            "weights": base if drawn else 0.0,
            "reference": 0.0 if config.topology.fsdp.cpu_offload else base / n.ranks,
            "reference in parameters": gathered,
            "reference as gathered": gathered,
            "activations": step.hidden + max(step.saved_by_layer(), step.before_head()),
            "logits": step.tile(),
        }
    if not drawn:
        return measuring
    rounds = BYTES[config.precision.weights] == 4 and config.precision.compute != "fp32"
    # the largest parameter: 16-bit and fp32 copies
    embedding = config.model.vocab_size * config.model.hidden_size
    loading = {
        "weights": base,
        "reference": base * (has_reference(config) or beforehand),
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
    """Return bytes of the model's own weights.

    nf4 packs the linear layers only; bitsandbytes leaves the others in 16 bits here.
    """
    model, width = config.model, BYTES[config.precision.weights]
    packed = 0
    if config.precision.weights == "nf4":
        packed = model.num_layers * sum(i * o for i, o in shapes.linear_sizes(model))
    return width * packed + max(2.0, width) * (model.num_parameters - packed)


def _optimizer_bytes(config: Config, n: _Counts, width: float) -> float:
    """Return bytes of the optimizer's moments.

    Unknown optimizers count as AdamW, with a warning by `uncounted` of launch/estimate/margin.py.
    """
    name = value(config, "optim")
    if name not in (*IN_8_BITS, OF_TORCHAO):
        return OPTIMIZERS.get(name, 2) * width * n.trained
    # Two one-byte moments and their scales; transformers keeps an embedding's moments in fp32.
    in_fp32 = 0 if name == OF_TORCHAO else n.embedding
    return 2 * (1 + 4 / 256) * (n.trained - in_fp32) + 8.0 * in_fp32


def moments(config: Config) -> dict[str, dict[str, float]]:
    """Return bytes on top of the state, in parts, at each moment that can be the largest."""
    size, n, optim = batch(config), _Counts.of(config), value(config, "optim")
    step, sharing = micro_step(config, size), _sharing(config, size)
    passes = _passes(config, step, sharing, size.accumulation > 1)
    peaks = {name: dict(zip(PARTS, sizes, strict=True)) for name, sizes in passes.items()}
    peaks["optimizer step"] = {
        "gradients": sharing.gradients_of_step,
        "communication": sharing.buffers_of_step,
    }
    if has_reference(config) and config.topology.strategy == "fsdp":
        # TRL shards the reference as one unit (trl.models.utils.prepare_fsdp). A forward gathers it
        # whole and splits it into parameters. Torch frees the gathered buffer only when the unit
        # gathers again (FSDPParamGroup.wait_for_unshard).
        whole = width(config) * n.base
        peaks["forward of the reference"] = {**peaks["forward"], "reference in parameters": whole}
        for parts in peaks.values():
            parts["reference as gathered"] = whole
    if optim == "adamw_torch":
        # torch's `foreach` step makes one more copy of all trained weights (docs.pytorch.org,
        # torch.optim.AdamW).
        peaks["optimizer step"]["optimizer's copies"] = state(config)["optimizer"] / 2
    if config.method.generates and not generates_with_vllm(config):
        parts = generating_bytes(config, generation_batch(config) // size.ranks)
        if config.adapter.rank is None:  # autocast keeps its copies of trained weights
            parts["weights in 16 bits"] = config.model.num_layers * step.linear_bytes()
        gathers = config.topology.strategy == "zero3" and value(config, "ds3_gather_for_generation")
        parts["communication"] = 2.0 * n.base if gathers else sharing.buffers
        peaks["generation"] = parts
    return peaks


def _passes(
    config: Config, step: MicroStep, sharing: _Sharing, accumulates: bool
) -> dict[str, tuple[float, ...]]:
    """Return the bytes of forward, backward and evaluation, in the order of PARTS."""
    model, strategy, layers = config.model, config.topology.strategy, config.model.num_layers
    again, hidden, one_layer = step.recomputing, step.hidden, step.saved_by_layer()
    stored = again * hidden + (layers - again) * one_layer
    copies = layers * step.linear_bytes()
    copies_kept = (layers - again) * step.linear_bytes()  # of layers that do not recompute
    last_copies = max(copies_kept, step.linear_bytes())
    # a compiled graph casts inside, so no copies are kept
    forward_copies = copies_kept if step.adapter or step.compiled else copies
    n, element = _Counts.of(config), step.numerics.hidden_bytes
    head_weights = float(n.embedding)
    own = n.width * head_weights
    # A tied head's gradient waits for the embedding's; an untied head's is accumulated at once.
    waiting = element * head_weights if model.tied_embeddings else 0.0
    # DeepSpeed's stage 3 allocates its gradients once (grad_partitions_flat_buffer); otherwise the
    # first micro-step starts without any.
    grads = sharing.gradients if accumulates or strategy == "zero3" else 0.0
    # The embedding's gradient becomes the accumulated one unless that already exists or is sharded.
    # Then there are two.
    second = element * head_weights if grads or strategy in SHARDED else 0.0
    head = 0.0 if step.head is Head.summed else step.tile()
    head += (4 + (2 if step.numerics is Numerics.cast else 0)) * head_weights
    repeated = one_layer if again else 0.0
    # The first layers recompute, so the last layer does only if all do.
    last = stored + (repeated if again == layers else 0.0) + step.backward_of_layer()
    first = (hidden if again else one_layer) + repeated + step.backward_of_layer()
    first_copies = step.linear_bytes() if again else copies
    last_gradients = grads or (0.0 if model.tied_embeddings else own)
    first_gradients = sharing.gradients - (own if model.tied_embeddings and not grads else 0.0)
    logits = step.tile() + step.head_gradient(head_weights)
    buffers, layer_buffers = sharing.buffers, sharing.buffers - sharing.buffers_of_head
    end = layer_buffers + sharing.gathered_again
    passes: dict[str, tuple[float, ...]] = {
        "forward": (stored + step.before_head(), logits, forward_copies, grads, buffers),
        "backward of the head": (stored + step.head_backward(), head, copies_kept, grads, buffers),
        "backward of the last layer": (last, waiting, last_copies, last_gradients, layer_buffers),
        "backward of the first layer": (first, waiting, first_copies, first_gradients, end),
        "backward of the embedding": (hidden, waiting + second, 0.0, sharing.gradients, end),
    }
    if config.method.selection.metric is not None:
        # an evaluation has no gradients: a layer's tensors, then the head's
        held_out = micro_step(config, evaluation_batch(config))
        tensors = held_out.hidden + max(held_out.saved_by_layer(), held_out.before_head())
        passes["evaluation"] = (tensors, held_out.tile(), forward_copies, 0.0, buffers)
    return passes


@dataclass(frozen=True)
class _Sharing:
    """Bytes of gradients and communication buffers, in the backward and at the step."""

    gradients: float
    buffers: float
    gradients_of_step: float
    buffers_of_step: float
    buffers_of_head: float = 0.0  # the part of `buffers` that the head's backward frees
    gathered_again: float = 0.0  # gathered again by the embedding's backward


def _sharing(config: Config, size: Batch) -> _Sharing:
    """Count gradients and buffers of the strategy.

    FSDP computes one layer while the next is gathered. While gradients accumulate, accelerate
    leaves them whole on every rank. ZeRO's gradients go through a bucket into a partition in the
    compute dtype, which the step flattens and casts to fp32. Stage 3 does so one sub-group at a
    time (_prepare_fp32_grad_for_sub_group), and gathers weights as FSDP does.
    """
    n, strategy, low = _Counts.of(config), config.topology.strategy, width(config)
    own, model, layers = n.width * n.trained, config.model, config.model.num_layers

    def gathered(num: int) -> float:  # embedding, head and `num` layers
        layer = shapes.layer_parameters(model)
        return low * (n.base - layers * layer + min(num, layers) * layer)

    if strategy == "fsdp":
        fsdp = config.topology.fsdp
        sharded = 0.0 if fsdp.cpu_offload else own / n.ranks
        # Accumulated gradients have the dtype of the reduction (torch's
        # FSDPParam.to_accumulated_grad_if_needed).
        element = 4.0 if fsdp.reduce_dtype == "fp32" else 2.0
        whole = element * n.trained if size.accumulation > 1 else sharded
        buffers = gathered(2 if fsdp.reshard_after_forward else layers)
        if model.tied_embeddings:  # head and embedding are one unit, gathered throughout
            return _Sharing(whole, buffers, sharded, 0.0)
        matrix = low * model.vocab_size * model.hidden_size
        if not fsdp.reshard_after_forward:
            return _Sharing(whole, buffers, sharded, 0.0, matrix)
        # embedding and head are each gathered when needed
        return _Sharing(whole, buffers - matrix, sharded, 0.0, matrix, matrix)
    if strategy in ("zero2", "zero3"):
        part, flat = low * n.trained / n.ranks, 4.0 * n.trained / n.ranks
        bucket, buffer = low * min(BUCKET, n.trained), 0.0
        if config.topology.zero.offload_optimizer:
            # A bucket is copied to the host; stage 2's temp_grad_buffer_for_gpu_offload holds the
            # largest parameter.
            part = flat = 0.0
            buffer = low * n.embedding
        if strategy == "zero2":
            return _Sharing(part, bucket + buffer, 2 * part + flat, buffer)
        # flattened in 16 bits, then in fp32
        stepped = min(4.0 * SUB_GROUP, flat) * (1.5 if low == 2 else 1.0)
        return _Sharing(part, 2 * bucket + gathered(2), part + stepped, bucket)
    # DDP holds its buckets in addition to the gradients
    buckets = own if strategy == "ddp" and n.ranks > 1 else 0.0
    return _Sharing(own, buckets, own, buckets)


def width(config: Config) -> float:
    """Return bytes of a weight as matrix products read it."""
    return 4.0 if config.precision.compute == "fp32" else 2.0
