"""Predict the memory of every process at its peak, in parts, from shapes alone.

Startup and a training step pass through several possible peaks (`preparation`, `moments`); the plan
shows the parts of the largest. Unless noted otherwise, a part follows from dtype and count: 4 bytes
per fp32 element, 2 per 16-bit element. docs/results/memory.md has measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launch.estimate import adapted
from launch.estimate.activations import MicroStep, Numerics
from launch.estimate.adapted import Adapted
from launch.estimate.batch import Batch, batch, evaluation_batch, generation_batch
from launch.estimate.reference import has_reference, measures_beforehand
from launch.inputs import engine_args
from launch.machine import placement
from launch.machine.detect import Host, is_smaller
from launch.machine.gpu import GIB
from launch.schema import Config, shapes
from launch.schema.enums import Head, Init, Rows, Vendor
from launch.schema.plan import Memory
from launch.schema.trainer_args import argument, value
from launch.schema.variables import ALLOCATOR, CPU_CACHE_GIB, is_expandable

# nf4: 4 bits, and an fp32 scale per 64 weights (arXiv:2305.14314)
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "nf4": 0.5625}
# kinds without a plan: one ends before the others start; one uses no GPU; two fill what there is
UNPLANNED = ("prepare", "exporter", "bench", "tune")
# Round figures. In addition to torch's tensors: the context, library workspaces and the allocator's
# rounding; on a CPU the interpreter and its libraries.
OVERHEAD_GB, CPU_OVERHEAD_GB = 2.0, 0.5
SYSTEM_GB = 8.0  # left to the system and data loading if GPU and host share memory: a round figure
SHARDED = ("fsdp", "zero2", "zero3")
BUCKET = 500_000_000  # elements of ZeRO's gradient buffer: DeepSpeed's default reduce_bucket_size
# parameters of a rank that ZeRO-3 steps at once: DeepSpeed's default sub_group_size
SUB_GROUP = 1_000_000_000


def measured(
    config: Config, processes: Sequence[placement.ProcessGroup], host: Host
) -> dict[int, float]:
    """Return memory in 1e9 bytes, by index, of used GPUs with less than hardware.memory_gb."""
    here = host.gpus_of(config.hardware.vendor)
    used = sorted({gpu for process in processes for gpu in process.gpus})
    return {
        i: here[i].memory_gb or 0.0
        for i in used
        if i < len(here) and is_smaller(here[i], config.hardware)
    }


def memory(
    config: Config, processes: Sequence[placement.ProcessGroup], smaller: Mapping[int, float] = {}
) -> list[Memory]:
    """Return one entry per process and GPU; `smaller` comes from `measured`.

    A process may share its GPU with the one before it.
    """
    topology, system = config.topology, SYSTEM_GB if config.hardware.unified_memory else 0.0
    nominal = config.hardware.memory_gb * GIB - system
    entries: list[Memory] = []
    for process in processes:
        if process.kind in UNPLANNED:
            continue
        serves = process.kind == "server" or argument(config, "engine") == "vllm"
        most = min([nominal, *(smaller[gpu] for gpu in process.gpus if gpu in smaller)])
        if serves:
            moment, parts, scattered = "", _server_parts(config, most), 0.0
        else:
            moment, parts = _rank_parts(config, most)
            scattered = _scattered_bytes(config) / 1e9
        # A server is limited to its share. Weights larger than it do not fit, however much memory
        # is free outside it.
        if serves and not topology.server_cache_gb:
            most *= topology.server_memory_share
        if placement.shares_gpu(config):
            most = max(0.0, most - sum(other.total_gb for other in entries))
        devices: list[int | None] = [*process.gpus] or [None]
        entries += [Memory(process.name, gpu, parts, most, moment, scattered) for gpu in devices]
    return entries


def on_host(config: Config, host: Host) -> list[Memory]:
    """Return the memory entries of a composition planned on a host. Raises HostError."""
    processes = placement.process_groups(config, host)
    return memory(config, processes, measured(config, processes, host))


def _server_parts(config: Config, capacity: float) -> dict[str, float]:
    """Return the parts of vLLM, which fills its share of the GPU.

    The key-value cache takes what the weights leave. vLLM does not start unless one sequence of
    full length fits there (vllm.v1.core.kv_cache_utils). Its graphs and a batch's tensors count as
    context.
    """
    topology, on_cpu = config.topology, config.hardware.vendor == Vendor.none
    weights = engine_args.weights_gb(config, _width(config)) / topology.server_tensor_parallel
    left = topology.server_memory_share * capacity - OVERHEAD_GB - weights
    # On a CPU the cache has a fixed size.
    room = CPU_CACHE_GIB * GIB if on_cpu else max(left, longest_served_gb(config))
    context = CPU_OVERHEAD_GB if on_cpu else OVERHEAD_GB
    return {"weights": weights, "kv cache": topology.server_cache_gb or room, "context": context}


def longest_served_gb(config: Config) -> float:
    """Return the GB of keys and values of one full-length sequence on each GPU of a server.

    vLLM does not start with a smaller cache.
    """
    longest = config.topology.server_max_length or config.model.max_positions
    # vLLM replicates the heads if there are fewer heads than GPUs.
    heads = max(1.0, config.model.num_kv_heads / config.topology.server_tensor_parallel)
    width = engine_args.cache_width(config, _width(config))
    return heads * longest * shapes.head_bytes(config.model, width) / 1e9


def _rank_parts(config: Config, capacity: float) -> tuple[str, dict[str, float]]:
    """Return the moment at which a rank uses most memory, and its parts then, in 1e9 bytes."""
    overhead = CPU_OVERHEAD_GB if config.hardware.vendor == Vendor.none else OVERHEAD_GB
    if not config.method.trains:
        rows = batch(config).per_device * int(value(config, "samples_per_prompt"))
        parts = {"weights": _base_bytes(config), **_generating(config, rows)}
        return "", {**{name: size / 1e9 for name, size in parts.items()}, "context": overhead}
    state, at = _state(config), moments(config)
    if config.topology.name == "colocate":
        vllm = {"vllm": float(value(config, "vllm_gpu_memory_utilization")) * capacity * 1e9}
        if value(config, "vllm_enable_sleep_mode"):  # frees its memory while the trainer trains
            at["generation"] = vllm
        else:
            state |= vllm
    held = {**preparation(config), **{name: {**state, **parts} for name, parts in at.items()}}
    moment, most = max(held.items(), key=lambda item: sum(item[1].values()))
    parts = {name: size / 1e9 for name, size in most.items() if size}
    return moment, {**parts, "context": overhead}


def _scattered_bytes(config: Config) -> float:
    """Return the most bytes that torch's allocator holds in addition to a trainer's tensors.

    0 on a CPU, and with an allocator that maps pages. Not every ROCm has one (pytorch#173330), and
    max_split_size_mb does not help at every size.
    """
    given = next((config.user_env[name] for name in ALLOCATOR if name in config.user_env), "")
    maps_pages = is_expandable(given) or "cudamallocasync" in given.lower()
    vendor = config.hardware.vendor
    if not config.method.trains or vendor == Vendor.none:
        return 0.0
    if maps_pages and vendor == Vendor.nvidia:
        return 0.0
    return micro_step(config, batch(config)).scattered()


def generates_with_vllm(config: Config) -> bool:
    return config.topology.servers > 0 or config.topology.name == "colocate"


def _generating(config: Config, rows: int) -> dict[str, float]:
    """Return bytes of generating `rows` completions under transformers.

    These are keys and values of every layer, and three fp32 copies of a token's logits (cast,
    processed, probabilities: GenerationMixin._sample).
    """
    token = config.model.num_kv_heads * shapes.head_bytes(config.model, _width(config))
    cache = token * batch(config).sequence
    return {"kv cache": rows * cache, "logits": 12.0 * rows * config.model.vocab_size}


def numerics(config: Config) -> Numerics:
    if config.precision.compute == "fp32":
        return Numerics.fp32
    # nf4 unpacks to 16 bits
    cast = config.topology.strategy in SHARDED or BYTES[config.precision.weights] <= 2
    return Numerics.cast if cast else Numerics.autocast


def micro_step(config: Config, size: Batch) -> MicroStep:
    """Return the micro-step of a rank; a preference counts as two rows."""
    rows = size.per_device * config.method.sequences_per_example
    all_layers = config.topology.fsdp.activation_checkpointing
    fused = config.hardware.fused_attention and config.hardware.attention != "eager"
    return MicroStep(
        config.model,
        numerics(config),
        rows,
        size.sequence,
        _adapted(config),
        bool(value(config, "gradient_checkpointing")) or all_layers,
        fused,
        compiled=bool(argument(config, "torch_compile") or config.step.compile),
        recomputed=None if all_layers else config.step.checkpointed_layers,
        fp8=config.precision.compute == "fp8",
        head=_head(config),
        liger=bool(argument(config, "use_liger_kernel")),
    )


def _head(config: Config) -> Head:
    """Return how logits are computed.

    ZeRO-3 never has the whole head in a backward; under an adapter the head is frozen, so no
    gradients are kept.
    """
    head = config.method.head
    if config.topology.strategy == "zero3" or head is Head.tiled:
        return Head.tiled
    if config.method.generates and config.step.rows != Rows.packed:  # completions use TRL's head
        return Head.tiled
    return Head.kept if head is Head.kept and config.adapter.rank is None else Head.summed


def _adapted(config: Config) -> Adapted | None:
    """Return the adapter as a micro-step sees it, if any.

    Its weights are fp32 under autocast, unless the strategy casts all weights or TRL casts them
    with nf4.
    """
    if config.adapter.rank is None:
        return None
    fp32, nf4 = config.precision.compute == "fp32", config.precision.weights == "nf4"
    low = not fp32 and (nf4 or config.topology.strategy in SHARDED)
    recast = nf4 or (numerics(config) is Numerics.cast and not low)
    return Adapted.of(config.model, config.adapter, 2 if low else 4, 4 if fp32 else 2, recast)


@dataclass(frozen=True)
class _Counts:
    """Numbers of elements, and bytes per element, that make up the state of a rank."""

    base: int  # all weights of the model
    trained: int
    ranks: int  # the ranks among which the strategy shards
    width: float  # bytes of a trained weight

    @classmethod
    def of(cls, config: Config) -> _Counts:
        train = adapted.trainable_parameters(config.model, config.adapter)
        # peft's weights are fp32; with nf4, TRL rounds them to bf16
        adapter = 2.0 if config.precision.weights == "nf4" else 4.0
        own = 4.0 if makes_fp32(config) else max(2.0, BYTES[config.precision.weights])
        return cls(
            config.model.num_parameters,
            train,
            placement.num_trainers(config),
            own if config.adapter.rank is None else adapter,
        )


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


def _state(config: Config) -> dict[str, float]:
    """Return bytes that stay from step to step, in parts.

    Sharding follows arXiv:1910.02054; Adam keeps two moments in a parameter's dtype.

    DeepSpeed holds 16-bit weights, an fp32 copy of them, and that copy's moments.
    """
    n, zero, low = _Counts.of(config), config.topology.zero, _width(config)
    shared = n.ranks if config.topology.strategy in ("fsdp", "zero3") else 1
    adapter = n.trained if config.adapter.rank is not None else 0
    base = _base_bytes(config)
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
    if config.topology.fsdp.cpu_offload or zero.offload_parameters:
        parts |= {"weights": 0.0, "adapter": 0.0, "reference": 0.0}
    if config.topology.fsdp.cpu_offload:
        parts["optimizer"] = 0.0
    return parts


def preparation(config: Config) -> dict[str, dict[str, float]]:
    """Return bytes of a rank before the first step, in parts.

    Random weights are drawn on its GPU, all of them on every rank.

    "loading": weights are rounded to their compute dtype, one parameter at a time
    (recipes/models/model.py). "sharding": accelerate 1.15's fsdp2_prepare_model holds the whole
    model (`original_sd`) until each parameter has its shard. 8B in fp32 with LoRA took 49.4 GB
    there on each of two H200s, and trains in 23. Weights from files come from the CPU, one
    parameter at a time.
    """
    n, base = _Counts.of(config), _base_bytes(config)
    drawn = config.model.init == Init.random and not config.model.path
    drawn = drawn and not generates_with_vllm(config)
    beforehand = config.topology.strategy == "fsdp" and measures_beforehand(config)
    measuring = {}
    if beforehand:
        measuring["measuring the reference"] = _measuring(config, n, base if drawn else 0.0)
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
    held = {"loading": loading}
    if config.topology.strategy == "fsdp":
        trained = n.width * n.trained
        whole = trained + (base if config.adapter.rank is not None else 0.0)
        shards = {
            "weights": 0.0 if config.topology.fsdp.cpu_offload else whole / n.ranks,
            "whole weights": whole,
        }
        held["sharding"] = {**shards, "reference": _state(config).get("reference", 0.0)}
    return {**held, **measuring}


def _measuring(config: Config, n: _Counts, weights: float) -> dict[str, float]:
    """Return bytes of FSDP's reference forward over all rows, before sharding.

    They are those of `moments`, but with the model's drawn weights whole.
    """
    rows = argument(config, "precompute_ref_batch_size")
    size = batch(config)
    step = micro_step(config, replace(size, per_device=int(rows)) if rows else size)
    gathered = _width(config) * n.base
    return {
        "weights": weights,
        "reference": 0.0 if config.topology.fsdp.cpu_offload else _base_bytes(config) / n.ranks,
        "reference in parameters": gathered,
        "reference as gathered": gathered,
        "activations": step.hidden + max(step.saved_by_layer(), step.before_head()),
        "logits": step.tile(),
    }


def _base_bytes(config: Config) -> float:
    """Return bytes of the model's own weights.

    nf4 packs the linear layers only; bitsandbytes leaves the others in 16 bits here.
    """
    model, width = config.model, BYTES[config.precision.weights]
    packed = 0
    if config.precision.weights == "nf4":
        packed = model.num_layers * sum(i * o for i, o in shapes.linear_sizes(model))
    return width * packed + max(2.0, width) * (model.num_parameters - packed)


# Number of moments in the parameter's dtype, by optim. Adafactor keeps sums of rows and columns,
# almost nothing (arXiv:1804.04235).
OPTIMIZERS = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
IN_8_BITS = ("adamw_8bit", "adamw_bnb_8bit")  # bitsandbytes
OF_TORCHAO = "adamw_torch_8bit"  # rounds the moments of every parameter of 4,096 elements or more


def _optimizer_bytes(config: Config, n: _Counts, width: float) -> float:
    """Return bytes of the optimizer's moments.

    Unknown optimizers count as AdamW, with a warning by launch/estimate/uncounted.py.
    """
    name = value(config, "optim")
    if name == OF_TORCHAO:
        return 2 * (1 + 4 / 256) * n.trained
    if name not in IN_8_BITS:
        return OPTIMIZERS.get(name, 2) * width * n.trained
    # Two one-byte moments and their scales; transformers keeps an embedding's moments in fp32.
    embedding = _trained_embedding(config)
    return 2 * (1 + 4 / 256) * (n.trained - embedding) + 8.0 * embedding


def _trained_embedding(config: Config) -> int:
    """Return the size of the largest trained parameter, embedding or head; 0 with an adapter."""
    has_adapter = config.adapter.rank is not None
    return 0 if has_adapter else config.model.vocab_size * config.model.hidden_size


# The order of sizes in a moment of `_passes`.
PARTS = ("activations", "logits", "weights in 16 bits", "gradients", "communication")


def moments(config: Config) -> dict[str, dict[str, float]]:
    """Return bytes on top of the state, in parts, at each moment that can be the largest."""
    size, n, optim = batch(config), _Counts.of(config), value(config, "optim")
    step, sharing = micro_step(config, size), _sharing(config, size)
    passes = _passes(config, step, sharing, size.accumulation > 1)
    held = {name: dict(zip(PARTS, sizes, strict=True)) for name, sizes in passes.items()}
    held["optimizer step"] = {
        "gradients": sharing.gradients_of_step,
        "communication": sharing.buffers_of_step,
    }
    if has_reference(config) and config.topology.strategy == "fsdp":
        # TRL shards the reference as one unit (trl.models.utils.prepare_fsdp). A forward gathers it
        # whole and splits it into parameters. Torch frees the gathered buffer only when the unit
        # gathers again (FSDPParamGroup.wait_for_unshard).
        whole = _width(config) * n.base
        held["forward of the reference"] = {**held["forward"], "reference in parameters": whole}
        for parts in held.values():
            parts["reference as gathered"] = whole
    if optim == "adamw_torch":
        # torch's `foreach` step makes one more copy of all trained weights (docs.pytorch.org,
        # torch.optim.AdamW).
        held["optimizer step"]["optimizer's copies"] = _state(config)["optimizer"] / 2
    if config.method.generates and not generates_with_vllm(config):
        parts = _generating(config, generation_batch(config) // size.ranks)
        if config.adapter.rank is None:  # autocast keeps its copies of trained weights
            parts["weights in 16 bits"] = config.model.num_layers * step.linear_bytes()
        gathers = config.topology.strategy == "zero3" and value(config, "ds3_gather_for_generation")
        parts["communication"] = 2.0 * n.base if gathers else sharing.buffers
        held["generation"] = parts
    return held


def _passes(
    config: Config, step: MicroStep, sharing: _Sharing, accumulates: bool
) -> dict[str, tuple[float, ...]]:
    """Return the PARTS of forward, backward and evaluation."""
    model, strategy, layers = config.model, config.topology.strategy, config.model.num_layers
    again, hidden, one_layer = step.recomputing, step.hidden, step.saved_by_layer()
    kept = again * hidden + (layers - again) * one_layer
    copies = layers * step.linear_bytes()
    copies_kept = (layers - again) * step.linear_bytes()  # of layers that do not recompute
    last_copies = max(copies_kept, step.linear_bytes())
    # a compiled graph casts inside, so no copies are kept
    forward_copies = copies_kept if step.adapter or step.compiled else copies
    head_weights = float(_trained_embedding(config))
    own, element = _Counts.of(config).width * head_weights, step.numerics.hidden_bytes
    # A tied head's gradient waits for the embedding's; an untied head's is accumulated at once.
    waiting = element * head_weights if model.tied_embeddings else 0.0
    # DeepSpeed's stage 3 allocates its gradients once (grad_partitions_flat_buffer); otherwise the
    # first micro-step starts without any.
    held = sharing.gradients if accumulates or strategy == "zero3" else 0.0
    # The embedding's gradient becomes the accumulated one unless that already exists or is sharded.
    # Then there are two.
    second = element * head_weights if held or strategy in SHARDED else 0.0
    head = 0.0 if step.head is Head.summed else step.tile()
    head += (4 + (2 if step.numerics is Numerics.cast else 0)) * head_weights
    repeated = one_layer if again else 0.0
    # The first layers recompute, so the last layer does only if all do.
    last = kept + (repeated if again == layers else 0.0) + step.backward_of_layer()
    first = (hidden if again else one_layer) + repeated + step.backward_of_layer()
    first_copies = step.linear_bytes() if again else copies
    last_gradients = held or (0.0 if model.tied_embeddings else own)
    first_gradients = sharing.gradients - (own if model.tied_embeddings and not held else 0.0)
    logits = step.tile() + step.made_in_forward(head_weights)
    buffers, layer_buffers = sharing.buffers, sharing.buffers - sharing.buffers_of_head
    end = layer_buffers + sharing.gathered_again
    passes: dict[str, tuple[float, ...]] = {
        "forward": (kept + step.before_head(), logits, forward_copies, held, buffers),
        "backward of the head": (kept + step.head_backward(), head, copies_kept, held, buffers),
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
    n, strategy = _Counts.of(config), config.topology.strategy
    own = n.width * n.trained
    if strategy == "fsdp":
        return _fsdp(config, size, n)
    if strategy in ("zero2", "zero3"):
        return _zero(config, n)
    # DDP holds its buckets in addition to the gradients
    buckets = own if strategy == "ddp" and n.ranks > 1 else 0.0
    return _Sharing(own, buckets, own, buckets)


def _fsdp(config: Config, size: Batch, n: _Counts) -> _Sharing:
    """Count FSDP's buffers: one layer computes while the next is gathered.

    While gradients accumulate, accelerate leaves them whole on every rank.
    """
    reshards = config.topology.fsdp.reshard_after_forward
    sharded = 0.0 if config.topology.fsdp.cpu_offload else n.width * n.trained / n.ranks
    # Accumulated gradients have the dtype of the reduction (torch's
    # FSDPParam.to_accumulated_grad_if_needed).
    kept = 4.0 if config.topology.fsdp.reduce_dtype == "fp32" else 2.0
    whole = kept * n.trained if size.accumulation > 1 else sharded
    layers, model = config.model.num_layers, config.model
    matrix = _width(config) * model.vocab_size * model.hidden_size
    if model.tied_embeddings:  # head and embedding are one unit, gathered throughout
        return _Sharing(whole, _gathered(config, n, 2 if reshards else layers), sharded, 0.0)
    if not reshards:
        return _Sharing(whole, _gathered(config, n, layers), sharded, 0.0, matrix)
    # embedding and head are each gathered when needed
    return _Sharing(whole, _gathered(config, n, 2) - matrix, sharded, 0.0, matrix, matrix)


def _zero(config: Config, n: _Counts) -> _Sharing:
    """Count ZeRO's gradients and buffers.

    Gradients go through a bucket into a partition in the compute dtype, which the step flattens and
    casts to fp32. Stage 3 does so one sub-group at a time (_prepare_fp32_grad_for_sub_group), and
    gathers weights as FSDP does.
    """
    low = _width(config)
    part, flat = low * n.trained / n.ranks, 4.0 * n.trained / n.ranks
    bucket, held = low * min(BUCKET, n.trained), 0.0
    if config.topology.zero.offload_optimizer:
        # A bucket is copied to the host; stage 2's temp_grad_buffer_for_gpu_offload holds the
        # largest parameter.
        part = flat = 0.0
        held = low * _trained_embedding(config)
    if config.topology.strategy == "zero2":
        return _Sharing(part, bucket + held, 2 * part + flat, held)
    # flattened in 16 bits, then in fp32
    stepped = min(4.0 * SUB_GROUP, flat) * (1.5 if low == 2 else 1.0)
    return _Sharing(part, 2 * bucket + _gathered(config, n, 2), part + stepped, bucket)


def _width(config: Config) -> float:
    """Return bytes of a weight as matrix products read it."""
    return 4.0 if config.precision.compute == "fp32" else 2.0


def _gathered(config: Config, n: _Counts, layers: int) -> float:
    """Return bytes of embedding, head and `layers` layers once gathered."""
    layer, num_layers = shapes.layer_parameters(config.model), config.model.num_layers
    return _width(config) * (n.base - num_layers * layer + min(layers, num_layers) * layer)
