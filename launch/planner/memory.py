"""Predict the memory of every process in parts, from shapes alone, at the moment when it holds most.

Startup and a training step pass through several such moments (`preparation`, `moments`); the plan shows the parts of the largest. Unless
noted otherwise, a part follows from dtype and count: 4 bytes per fp32 element, 2 per 16-bit element. docs/results/memory.md compares
predictions with measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from launch import engine_args, topology
from launch.batch import Batch, batch, evaluation_batch, generation_batch
from launch.environment import ALLOCATOR, CPU_CACHE_GIB, is_expandable
from launch.machine.detect import Host, is_smaller
from launch.machine.gpu import GIB
from launch.planner import adapted, shapes
from launch.planner.activations import Head, MicroStep, Numerics
from launch.planner.adapted import Adapted
from launch.planner.reference import has_reference, measures_beforehand
from launch.schema import Config
from launch.schema.enums import Init, Rows, Vendor
from launch.supervision import serving
from launch.trainer_args import argument, value

BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "nf4": 0.5625}  # nf4: 4 bits, and an fp32 scale per 64 weights (arXiv:2305.14314)
UNPLANNED = ("prepare", "exporter", "bench", "tune")  # kinds: ends before the others start; uses no GPU; the last two fill what there is
# In addition to torch's tensors: the context, library workspaces and the allocator's rounding. A round figure.
OVERHEAD_GB = 2.0
CPU_OVERHEAD_GB = 0.5  # the interpreter and its libraries: a round figure
SYSTEM_GB = 8.0  # for the system and for loading data where GPU and host share memory: a round figure
BUCKET = 500_000_000  # elements of ZeRO's gradient buffer: DeepSpeed's default reduce_bucket_size
SUB_GROUP = 1_000_000_000  # parameters of a rank that ZeRO-3 steps at once: DeepSpeed's default sub_group_size


@dataclass(frozen=True)
class Memory:
    """Planned memory of one process on one of its GPUs; 1 GB is 1e9 bytes."""

    process: str
    gpu: int | None  # None: the host's memory
    parts_gb: dict[str, float]
    capacity_gb: float
    moment: str = ""  # the moment of training at which a rank holds most
    scattered_gb: float = 0.0  # more that torch's allocator may hold: free, but in pieces too small to reuse

    @property
    def total_gb(self) -> float:
        return sum(self.parts_gb.values())

    @property
    def allocated_gb(self) -> float:
        """The part of it that torch.cuda.max_memory_allocated counts."""
        return self.total_gb - self.parts_gb.get("context", 0.0)

    @property
    def fits(self) -> bool:
        return self.total_gb <= self.capacity_gb + 1e-6  # a server fills its share exactly, but for rounding


def measured(config: Config, processes: list[topology.Process], host: Host) -> dict[int, float]:
    """Return memory in 1e9 bytes, by index, of this host's GPUs that the processes use and that have less than hardware.memory_gb."""
    here = host.gpus_of(config.hardware.vendor)
    used = sorted({gpu for process in processes for gpu in process.gpus})
    return {i: here[i].memory_gb or 0.0 for i in used if i < len(here) and is_smaller(here[i], config.hardware)}


def memory(config: Config, processes: list[topology.Process], smaller: Mapping[int, float] = {}) -> list[Memory]:
    """Return one entry per process and GPU; a process may share its GPU with the one before it. `smaller` comes from `measured`."""
    nominal = config.hardware.memory_gb * GIB - (SYSTEM_GB if config.hardware.unified_memory else 0.0)
    planned = [process for process in processes if process.kind not in UNPLANNED]
    found: list[Memory] = []
    for process in planned:
        serves = process.kind == "server" or argument(config, "engine") == "vllm"
        capacity = min([nominal, *(smaller[gpu] for gpu in process.gpus if gpu in smaller)])
        moment, parts = ("", _server_parts(config, capacity)) if serves else _rank_parts(config, capacity)
        # A server is limited to its share: weights that outgrow it do not fit, however much memory is free outside it.
        most = capacity * (config.topology.server_memory_share if serves and not config.topology.server_cache_gb else 1.0)
        most = max(0.0, most - sum(other.total_gb for other in found)) if serving.shares_gpu(config) else most
        devices: list[int | None] = [*process.gpus] or [None]
        scattered = 0.0 if serves else _scattered_bytes(config) / 1e9
        found += [Memory(process.name, gpu, parts, most, moment, scattered) for gpu in devices]
    return found


def _server_parts(config: Config, capacity: float) -> dict[str, float]:
    """Return the parts of vLLM, which fills its share of the GPU: the key-value cache takes what the weights leave. vLLM does not start
    unless one sequence of full length fits there (vllm.v1.core.kv_cache_utils). Its graphs and a batch's tensors count as context."""
    weights = engine_args.weights_gb(config, _width(config)) / config.topology.server_tensor_parallel
    on_cpu = config.hardware.vendor == Vendor.none  # the cache has a fixed size there
    left = config.topology.server_memory_share * capacity - OVERHEAD_GB - weights
    room = CPU_CACHE_GIB * GIB if on_cpu else max(left, longest_served_gb(config))
    return {"weights": weights, "kv cache": config.topology.server_cache_gb or room, "context": CPU_OVERHEAD_GB if on_cpu else OVERHEAD_GB}


def longest_served_gb(config: Config) -> float:
    """Return the keys and values of one sequence of full length on each GPU of a server, the least that vLLM starts with."""
    longest = config.topology.server_max_length or config.model.max_positions
    heads = max(1.0, config.model.num_kv_heads / config.topology.server_tensor_parallel)  # with fewer heads than GPUs, each GPU has one
    return heads * longest * shapes.head_bytes(config.model, engine_args.cache_width(config, _width(config))) / 1e9


def _rank_parts(config: Config, capacity: float) -> tuple[str, dict[str, float]]:
    """Return the moment at which a rank holds most, and its parts in 1e9 bytes."""
    overhead = CPU_OVERHEAD_GB if config.hardware.vendor == Vendor.none else OVERHEAD_GB
    if config.method.kind != "trainer":
        rows = batch(config).per_device * int(value(config, "samples_per_prompt"))
        parts = {"weights": _base_bytes(config), **_generating(config, rows)}
        return "", {**{name: size / 1e9 for name, size in parts.items()}, "context": overhead}
    state, at = _state(config), moments(config)
    if config.topology.name == "colocate":
        vllm = {"vllm": float(value(config, "vllm_gpu_memory_utilization")) * capacity * 1e9}
        if value(config, "vllm_enable_sleep_mode"):  # vLLM frees its memory while the trainer trains
            at["generation"] = vllm
        else:
            state |= vllm
    held = {**preparation(config), **{name: {**state, **parts} for name, parts in at.items()}}
    moment, most = max(held.items(), key=lambda item: sum(item[1].values()))
    parts = {name: size / 1e9 for name, size in most.items() if size}
    return moment, {**parts, "context": overhead}


def _scattered_bytes(config: Config) -> float:
    """Return the most that torch's allocator holds in addition to a trainer's tensors; 0 with another allocator and on a CPU."""
    if config.method.kind != "trainer" or config.hardware.vendor == Vendor.none or _has_no_blocks(config):
        return 0.0
    return micro_step(config, batch(config)).scattered()


def _has_no_blocks(config: Config) -> bool:
    """Return whether the user asked for an allocator that maps pages. Not every ROCm has one (pytorch#173330), and max_split_size_mb does
    not help at every size."""
    given = next((config.user_env[name] for name in ALLOCATOR if name in config.user_env), "")
    return config.hardware.vendor == Vendor.nvidia and (is_expandable(given) or "cudamallocasync" in given.lower())


def generates_with_vllm(config: Config) -> bool:
    return config.topology.servers > 0 or config.topology.name == "colocate"


def _generating(config: Config, rows: int) -> dict[str, float]:
    """Return bytes of `rows` completions under transformers: keys and values of every layer, and three fp32 copies of a token's logits
    (cast, processed, probabilities: GenerationMixin._sample)."""
    cache = config.model.num_kv_heads * shapes.head_bytes(config.model, _width(config)) * batch(config).sequence
    return {"kv cache": rows * cache, "logits": 12.0 * rows * config.model.vocab_size}


def numerics(config: Config) -> Numerics:
    if config.precision.compute == "fp32":
        return Numerics.fp32
    cast = config.topology.strategy in ("fsdp", "zero2", "zero3") or BYTES[config.precision.weights] <= 2  # nf4 unpacks to 16 bits
    return Numerics.cast if cast else Numerics.autocast


def micro_step(config: Config, size: Batch) -> MicroStep:
    """Return the micro-step of a rank; a preference counts as two rows."""
    rows = size.per_device * (2 if config.method.name == "dpo" else 1)
    checkpointing = bool(value(config, "gradient_checkpointing")) or config.topology.fsdp.activation_checkpointing
    fused = config.hardware.fused_attention and config.hardware.attention != "eager"
    return MicroStep(
        config.model,
        numerics(config),
        rows,
        size.sequence,
        _adapted(config),
        checkpointing,
        fused,
        compiled=bool(argument(config, "torch_compile") or config.step.compile),
        recomputed=None if config.topology.fsdp.activation_checkpointing else config.step.checkpointed_layers,
        fp8=config.precision.compute == "fp8",
        head=_head(config),
        liger=bool(argument(config, "use_liger_kernel")),
    )


def _head(config: Config) -> Head:
    """Return how logits are computed. ZeRO-3 has no whole head in a backward; under an adapter it is frozen, so no gradients are kept."""
    keeps = config.method.name == "dpo" or (config.method.name == "grpo" and config.step.rows == Rows.packed)
    if config.topology.strategy == "zero3" or not (keeps or config.method.name == "sft"):
        return Head.tiled
    return Head.kept if keeps and config.adapter.rank is None else Head.summed


def _adapted(config: Config) -> Adapted | None:
    """Return the adapter, if any. Under autocast its weights are fp32, unless the strategy casts all weights or TRL those with nf4."""
    if config.adapter.rank is None:
        return None
    fp32, nf4 = config.precision.compute == "fp32", config.precision.weights == "nf4"
    low = not fp32 and (nf4 or config.topology.strategy in ("fsdp", "zero2", "zero3"))
    recast = nf4 or (numerics(config) is Numerics.cast and not low)
    return Adapted.of(config.model, config.adapter, 2 if low else 4, 4 if fp32 else 2, recast)


@dataclass(frozen=True)
class _Counts:
    """Numbers of elements, and bytes per element, that make up the state of a rank."""

    base: int  # all weights of the model
    trained: int
    ranks: int  # among which the strategy shards
    width: float  # bytes of a trained weight

    @classmethod
    def of(cls, config: Config) -> _Counts:
        train = adapted.trainable_parameters(config.model, config.adapter)
        adapter = 2.0 if config.precision.weights == "nf4" else 4.0  # peft's are fp32; with nf4, TRL rounds them to bf16
        own = 4.0 if makes_fp32(config) else max(2.0, BYTES[config.precision.weights])
        return cls(config.model.num_parameters, train, topology.num_trainers(config), own if config.adapter.rank is None else adapter)


def makes_fp32(config: Config) -> bool:
    """Return whether weights loaded in 16 bits train in fp32: accelerate's fsdp2_prepare_model casts them under mixed precision."""
    return config.topology.strategy == "fsdp" and config.precision.compute != "fp32" and BYTES[config.precision.weights] == 2


def stepped_bytes(config: Config) -> float:
    """Return bytes of a weight as the optimizer steps it: DeepSpeed keeps a copy in fp32."""
    return 4.0 if config.topology.strategy in ("zero2", "zero3") else _Counts.of(config).width


def _state(config: Config) -> dict[str, float]:
    """Return bytes that stay from step to step, in parts. Sharding after arXiv:1910.02054; Adam keeps two moments in a parameter's dtype.

    DeepSpeed holds 16-bit weights, an fp32 copy of them, and that copy's moments.
    """
    n, zero, low = _Counts.of(config), config.topology.zero, _width(config)
    shared = n.ranks if config.topology.strategy in ("fsdp", "zero3") else 1
    adapter = n.trained if config.adapter.rank is not None else 0
    base = _base_bytes(config)
    found = {"weights": base / shared, "adapter": n.width * adapter / shared}
    if makes_fp32(config) and config.adapter.rank is None:
        found["weights"] = 4.0 * n.base / shared
    found["optimizer"] = _optimizer_bytes(config, n, n.width) / shared
    if config.topology.strategy in ("zero2", "zero3"):
        found |= {"weights": min(low * n.base, base) / shared, "adapter": low * adapter / shared}
        found |= {"master weights": 4.0 * n.trained / n.ranks, "optimizer": _optimizer_bytes(config, n, 4.0) / n.ranks}
        if zero.offload_optimizer:
            found |= {"optimizer": 0.0, "master weights": 0.0}
    if has_reference(config):  # TRL gives it to the strategy too: whole under ZeRO-2, as loaded under FSDP2
        found["reference"] = base / shared if config.topology.strategy == "fsdp" else found["weights"]
    if config.topology.fsdp.cpu_offload or zero.offload_parameters:
        found |= {"weights": 0.0, "adapter": 0.0, "reference": 0.0}
    if config.topology.fsdp.cpu_offload:
        found["optimizer"] = 0.0
    return found


def preparation(config: Config) -> dict[str, dict[str, float]]:
    """Return bytes of a rank before the first step, in parts. Random weights are drawn on its GPU, all of them on every rank.

    "loading": they are rounded to their compute dtype, one parameter at a time (recipes/common/model.py).
    "sharding": accelerate 1.15's fsdp2_prepare_model holds the whole model (`original_sd`) until each parameter has its shard. 8B in fp32
    with LoRA took 49.4 GB there on each of two H200s, and trains in 23. Weights read from files come from the CPU, one parameter at a time.
    """
    n, base = _Counts.of(config), _base_bytes(config)
    drawn = config.model.init == Init.random and not config.model.path and not generates_with_vllm(config)
    beforehand = config.topology.strategy == "fsdp" and measures_beforehand(config)
    measured = {"measuring the reference": _measuring(config, n, base if drawn else 0.0)} if beforehand else {}
    if not drawn:
        return measured
    rounds = BYTES[config.precision.weights] == 4 and config.precision.compute != "fp32"
    embedding = config.model.vocab_size * config.model.hidden_size  # the largest parameter: 16-bit and fp32 copies
    found = {"loading": {"weights": base, "reference": base * (has_reference(config) or beforehand), "rounding": 6.0 * embedding * rounds}}
    if config.topology.strategy == "fsdp":
        trained = n.width * n.trained
        whole = trained + (base if config.adapter.rank is not None else 0.0)
        shards = {"weights": 0.0 if config.topology.fsdp.cpu_offload else whole / n.ranks, "whole weights": whole}
        found["sharding"] = {**shards, "reference": _state(config).get("reference", 0.0)}
    return {**found, **measured}


def _measuring(config: Config, n: _Counts, weights: float) -> dict[str, float]:
    """Return bytes of FSDP's reference forward over all rows, as in `moments`, but before sharding: the model's drawn weights are whole."""
    rows = argument(config, "precompute_ref_batch_size")
    step = micro_step(config, replace(batch(config), per_device=int(rows)) if rows else batch(config))
    gathered = _width(config) * n.base
    shard = 0.0 if config.topology.fsdp.cpu_offload else _base_bytes(config) / n.ranks
    parts = {"weights": weights, "reference": shard, "reference in parameters": gathered, "reference as gathered": gathered}
    return {**parts, "activations": step.hidden + max(step.saved_by_layer(), step.before_head()), "logits": step.tile()}


def _base_bytes(config: Config) -> float:
    """Return bytes of the model's own weights. nf4 packs the linear layers only; bitsandbytes leaves the others in 16 bits here."""
    model, width = config.model, BYTES[config.precision.weights]
    packed = model.num_layers * sum(i * o for i, o in shapes.linear_sizes(model)) if config.precision.weights == "nf4" else 0
    return width * packed + max(2.0, width) * (model.num_parameters - packed)


# Number of moments in the parameter's dtype, by optim. Adafactor keeps sums of rows and columns, almost nothing (arXiv:1804.04235).
OPTIMIZERS = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
IN_8_BITS = ("adamw_8bit", "adamw_bnb_8bit")  # bitsandbytes
OF_TORCHAO = "adamw_torch_8bit"  # rounds the moments of every parameter of 4,096 elements or more


def _optimizer_bytes(config: Config, n: _Counts, width: float) -> float:
    """Return bytes of the optimizer's moments; unknown optimizers count as AdamW, with a warning by launch/planner/uncounted.py."""
    name = value(config, "optim")
    if name == OF_TORCHAO:
        return 2 * (1 + 4 / 256) * n.trained
    if name not in IN_8_BITS:
        return OPTIMIZERS.get(name, 2) * width * n.trained
    # Two one-byte moments and their scales; transformers keeps an embedding's moments in fp32.
    embedding = _trained_embedding(config)
    return 2 * (1 + 4 / 256) * (n.trained - embedding) + 8.0 * embedding


def _trained_embedding(config: Config) -> int:
    """Return the size of the largest trained parameter, the embedding or head; 0 if an adapter trains instead."""
    return 0 if config.adapter.rank is not None else config.model.vocab_size * config.model.hidden_size


def moments(config: Config) -> dict[str, dict[str, float]]:
    """Return bytes in addition to the state, in parts, at each moment that can be the largest."""
    size = batch(config)
    n, step, sharing = _Counts.of(config), micro_step(config, size), _sharing(config, size)
    model, layers = config.model, config.model.num_layers
    trains_head = config.adapter.rank is None
    again = step.recomputing
    kept = again * step.hidden + (layers - again) * step.saved_by_layer()
    copies = layers * step.linear_bytes()
    copies_kept = (layers - again) * step.linear_bytes()  # of the layers that do not recompute
    head_weights = float(_trained_embedding(config))
    # A tied head's gradient waits for the embedding's; an untied head's is accumulated at once.
    waiting = step.numerics.hidden_bytes * head_weights if model.tied_embeddings else 0.0
    # DeepSpeed's stage 3 allocates its gradients once (grad_partitions_flat_buffer); otherwise the first micro-step starts without any.
    held = sharing.gradients if size.accumulation > 1 or config.topology.strategy == "zero3" else 0.0
    # The embedding's gradient becomes the accumulated one, unless that exists already or is sharded: then there are two.
    sharded = config.topology.strategy in ("fsdp", "zero2", "zero3")
    second = step.numerics.hidden_bytes * head_weights if held or sharded else 0.0
    one_layer = step.saved_by_layer() if again else 0.0
    # The first layers recompute, so the last one does only if all do.
    backward = {"activations": kept + (one_layer if again == layers else 0.0) + step.backward_of_layer(), "logits": waiting}
    backward["weights in 16 bits"] = max(copies_kept, step.linear_bytes())
    found = {
        "forward": {
            "activations": kept + step.before_head(),
            "logits": step.tile() + step.made_in_forward(head_weights),
            "weights in 16 bits": copies_kept if step.adapter or step.compiled else copies,  # a compiled graph casts inside
            "gradients": held,
        },
        "backward of the head": {
            "activations": kept + step.head_backward(),
            "logits": (0.0 if step.head is Head.summed else step.tile())
            + (4 + (2 if step.numerics is Numerics.cast else 0)) * head_weights,
            "weights in 16 bits": copies_kept,
            "gradients": held,
        },
        "backward of the last layer": {**backward, "gradients": held or (0.0 if model.tied_embeddings else n.width * head_weights)},
        "backward of the first layer": {
            **backward,
            "activations": (step.hidden if again else step.saved_by_layer()) + one_layer + step.backward_of_layer(),
            "weights in 16 bits": step.linear_bytes() if again else copies,
            "gradients": sharing.gradients - (n.width * head_weights if model.tied_embeddings and not held else 0.0),
        },
        "backward of the embedding": {"activations": step.hidden, "logits": waiting + second, "gradients": sharing.gradients},
    }
    if config.method.selection.metric is not None:  # no gradients: a layer's tensors, and the head's after them
        held_out = micro_step(config, evaluation_batch(config))
        tensors = max(held_out.saved_by_layer(), held_out.before_head())
        found["evaluation"] = {"activations": held_out.hidden + tensors, "logits": held_out.tile()}
        found["evaluation"]["weights in 16 bits"] = found["forward"]["weights in 16 bits"]
    for parts in found.values():
        parts["communication"] = sharing.buffers
    for moment in ("backward of the last layer", "backward of the first layer", "backward of the embedding"):
        found[moment]["communication"] -= sharing.buffers_of_head
    for moment in ("backward of the first layer", "backward of the embedding"):
        found[moment]["communication"] += sharing.gathered_again
    found["optimizer step"] = {"gradients": sharing.gradients_of_step, "communication": sharing.buffers_of_step}
    if has_reference(config) and config.topology.strategy == "fsdp":
        # TRL shards it as one unit (trl.models.utils.prepare_fsdp). A forward gathers it whole and splits it into parameters; torch frees
        # the gathered buffer only when the unit gathers again (FSDPParamGroup.wait_for_unshard).
        found["forward of the reference"] = {**found["forward"], "reference in parameters": _width(config) * n.base}
        for parts in found.values():
            parts["reference as gathered"] = _width(config) * n.base
    if value(config, "optim") == "adamw_torch":
        # torch's `foreach` step makes one more copy of all trained weights (docs.pytorch.org, torch.optim.AdamW).
        found["optimizer step"]["optimizer's copies"] = _state(config)["optimizer"] / 2
    if config.method.name == "grpo" and not generates_with_vllm(config):
        found["generation"] = _generating(config, generation_batch(config) // size.ranks)
        if trains_head:  # autocast keeps its copies of trained weights through a forward
            found["generation"]["weights in 16 bits"] = copies
        whole = config.topology.strategy == "zero3" and value(config, "ds3_gather_for_generation")
        found["generation"]["communication"] = 2.0 * n.base if whole else sharing.buffers
    return found


@dataclass(frozen=True)
class _Sharing:
    """Bytes of gradients and of a strategy's communication buffers, in the backward and at the optimizer step."""

    gradients: float
    buffers: float
    gradients_of_step: float
    buffers_of_step: float
    buffers_of_head: float = 0.0  # the part of `buffers` that the head's backward frees
    gathered_again: float = 0.0  # by the embedding's backward


def _sharing(config: Config, size: Batch) -> _Sharing:
    n, strategy = _Counts.of(config), config.topology.strategy
    own = n.width * n.trained
    if strategy == "fsdp":
        return _fsdp(config, size, n)
    if strategy in ("zero2", "zero3"):
        return _zero(config, n)
    buckets = own if strategy == "ddp" and n.ranks > 1 else 0.0  # DDP holds its buckets in addition to the gradients
    return _Sharing(own, buckets, own, buckets)


def _fsdp(config: Config, size: Batch, n: _Counts) -> _Sharing:
    """Count FSDP: one layer computes while the next is gathered. While gradients accumulate, accelerate leaves them whole on every rank."""
    reshards = config.topology.fsdp.reshard_after_forward
    sharded = 0.0 if config.topology.fsdp.cpu_offload else n.width * n.trained / n.ranks
    # Accumulated gradients have the dtype of the reduction (torch's FSDPParam.to_accumulated_grad_if_needed).
    kept = 4.0 if config.topology.fsdp.reduce_dtype == "fp32" else 2.0
    whole = kept * n.trained if size.accumulation > 1 else sharded
    layers, model = config.model.num_layers, config.model
    matrix = _width(config) * model.vocab_size * model.hidden_size
    if model.tied_embeddings:  # head and embedding are one unit, gathered throughout
        return _Sharing(whole, _gathered(config, n, 2 if reshards else layers), sharded, 0.0)
    if not reshards:
        return _Sharing(whole, _gathered(config, n, layers), sharded, 0.0, matrix)
    return _Sharing(whole, _gathered(config, n, 2) - matrix, sharded, 0.0, matrix, matrix)  # embedding and head, each when needed


def _zero(config: Config, n: _Counts) -> _Sharing:
    """Count ZeRO. Gradients go through a bucket into a partition in the compute dtype, which the step flattens and casts to fp32; stage 3
    does so one sub-group at a time (_prepare_fp32_grad_for_sub_group), and gathers weights as FSDP does."""
    low = _width(config)
    part, flat, bucket = low * n.trained / n.ranks, 4.0 * n.trained / n.ranks, low * min(BUCKET, n.trained)
    held = 0.0
    if config.topology.zero.offload_optimizer:
        part = flat = 0.0  # a bucket is copied to the host; stage 2's temp_grad_buffer_for_gpu_offload holds the largest parameter
        held = low * _trained_embedding(config)
    if config.topology.strategy == "zero2":
        return _Sharing(part, bucket + held, 2 * part + flat, held)
    stepped = min(4.0 * SUB_GROUP, flat) * (1.5 if low == 2 else 1.0)  # flattened in 16 bits, then in fp32
    return _Sharing(part, 2 * bucket + _gathered(config, n, 2), part + stepped, bucket)


def _width(config: Config) -> float:
    """Return bytes of a weight as matrix products read it."""
    return 4.0 if config.precision.compute == "fp32" else 2.0


def _gathered(config: Config, n: _Counts, layers: int) -> float:
    """Return bytes of all weights outside the layers (embedding and head) and of `layers` layers, as gathered."""
    layer = shapes.layer_parameters(config.model)
    low = _width(config)
    return low * (n.base - config.model.num_layers * layer + min(layers, config.model.num_layers) * layer)
