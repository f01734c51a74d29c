"""Predict the memory of every process at its peak, in parts, from shapes alone.

Startup and a training step pass through several possible peaks (`preparation`, `moments`); the plan
shows the parts of the largest. docs/results/memory.md has measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.estimate import rank_memory
from launch.estimate.activations import micro_step
from launch.estimate.batch_counts import batch
from launch.inputs import engine_args
from launch.machine import placement
from launch.machine.detect import Host, is_smaller
from launch.machine.gpu import GIB
from launch.schema import Config, shapes
from launch.schema.enums import Vendor
from launch.schema.plan import Memory
from launch.schema.trainer_args import argument, value
from launch.schema.variables import ALLOCATOR, CPU_CACHE_GIB, is_expandable

# kinds without a plan: one ends before the others start, one uses no GPU, two fill the memory
UNPLANNED = ("prepare", "exporter", "bench", "tune")
# Round figures. In addition to torch's tensors: the context, library workspaces and the allocator's
# rounding; on a CPU the interpreter and its libraries.
OVERHEAD_GB, CPU_OVERHEAD_GB = 2.0, 0.5
SYSTEM_GB = 8.0  # left to the system and data loading if GPU and host share memory: a round figure


def measured(
    config: Config, processes: Sequence[placement.ProcessGroup], host: Host
) -> dict[int, float]:
    """Return memory in 1e9 bytes, by index, of used GPUs with less than hardware.memory_gb."""
    here = host.gpus_of(config.hardware.vendor)
    indices = sorted({gpu for process in processes for gpu in process.gpus})
    return {
        i: here[i].memory_gb or 0.0
        for i in indices
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
        # A server is limited to its share. Weights larger than this share do not fit, even if
        # memory outside it is free.
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
    weights = (
        engine_args.weights_gb(config, rank_memory.width(config)) / topology.server_tensor_parallel
    )
    rest_gb = topology.server_memory_share * capacity - OVERHEAD_GB - weights
    # On a CPU the cache has a fixed size.
    room = CPU_CACHE_GIB * GIB if on_cpu else max(rest_gb, longest_served_gb(config))
    context = CPU_OVERHEAD_GB if on_cpu else OVERHEAD_GB
    return {"weights": weights, "kv cache": topology.server_cache_gb or room, "context": context}


def longest_served_gb(config: Config) -> float:
    """Return the GB of keys and values of one full-length sequence on each GPU of a server.

    vLLM does not start with a smaller cache.
    """
    longest = config.topology.server_max_length or config.model.max_positions
    # vLLM replicates the heads if there are fewer heads than GPUs.
    heads = max(1.0, config.model.num_kv_heads / config.topology.server_tensor_parallel)
    width = engine_args.cache_width(config, rank_memory.width(config))
    return heads * longest * shapes.head_bytes(config.model, width) / 1e9


def _rank_parts(config: Config, capacity: float) -> tuple[str, dict[str, float]]:
    """Return the moment at which a rank uses most memory, and its parts then, in 1e9 bytes."""
    overhead = CPU_OVERHEAD_GB if config.hardware.vendor == Vendor.none else OVERHEAD_GB
    if not config.method.trains:
        rows = batch(config).per_device * int(value(config, "samples_per_prompt"))
        parts = {
            "weights": rank_memory.base_bytes(config),
            **rank_memory.generating_bytes(config, rows),
        }
        return "", {**{name: size / 1e9 for name, size in parts.items()}, "context": overhead}
    state, at = rank_memory.state(config), rank_memory.moments(config)
    if config.topology.name == "colocate":
        vllm = {"vllm": float(value(config, "vllm_gpu_memory_utilization")) * capacity * 1e9}
        if value(config, "vllm_enable_sleep_mode"):  # frees its memory while the trainer trains
            at["generation"] = vllm
        else:
            state |= vllm
    peaks = {
        **rank_memory.preparation(config),
        **{name: {**state, **parts} for name, parts in at.items()},
    }
    moment, most = max(peaks.items(), key=lambda item: sum(item[1].values()))
    parts = {name: size / 1e9 for name, size in most.items() if size}
    return moment, {**parts, "context": overhead}


def _scattered_bytes(config: Config) -> float:
    """Return the most bytes that torch's allocator holds in addition to a trainer's tensors.

    0 on a CPU, and with an allocator that maps pages. Not every ROCm has one (pytorch#173330), and
    max_split_size_mb does not help at every size.
    """
    options = next((config.user_env[name] for name in ALLOCATOR if name in config.user_env), "")
    maps_pages = is_expandable(options) or "cudamallocasync" in options.lower()
    vendor = config.hardware.vendor
    if not config.method.trains or vendor == Vendor.none:
        return 0.0
    if maps_pages and vendor == Vendor.nvidia:
        return 0.0
    return micro_step(config, batch(config)).scattered()
