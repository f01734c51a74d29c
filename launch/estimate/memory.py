"""Predict the peak memory of every process, in parts, from shapes alone.

Startup and a training step have several moments that may be the peak (`preparation` and `moments`
of launch/estimate/rank_memory.py). The plan shows the parts of the largest one.
docs/results/memory.md has measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from launch.estimate import rank_memory, rank_state
from launch.estimate.activations import micro_step
from launch.estimate.batch_counts import batch
from launch.inputs import engine_args
from launch.machine import placement, sysfs
from launch.machine.detect import Host, is_smaller
from launch.machine.gpu import GIB
from launch.schema import Config, shapes
from launch.schema.enums import Vendor
from launch.schema.plan import Memory
from launch.schema.trainer_args import value, value_or_none
from launch.schema.variables import ALLOCATOR, CPU_CACHE_GIB, is_expandable

# Kinds of processes without an entry. The first exits before the others start, the second uses no
# GPU, and the last two fill the memory.
UNPLANNED = ("prepare", "exporter", "bench", "tune")
HOST = "host"  # in place of a process: the memory of the machine, with offloaded parts
# Round numbers for memory outside torch's tensors: the context, library workspaces and the rounding
# of the allocator, or on a CPU the interpreter and its libraries.
OVERHEAD_GB, CPU_OVERHEAD_GB = 2.0, 0.5
# Share by which memory may exceed the plan. Round numbers, since no such model has been measured:
# models with experts, and architectures whose layers are counted as llama's.
EXPERTS_ERROR, GENERIC_ERROR = 0.10, 0.25
SYSTEM_GB = 8.0  # round number for the system and data loading, if GPU and host share memory


def error_of(config: Config) -> float:
    """Return the share by which the memory of a process may exceed the plan."""
    of_model = EXPERTS_ERROR if config.model.num_experts else 0.0
    if not shapes.is_known(config.model):
        of_model = GENERIC_ERROR
    return max(config.hardware.memory_error, of_model)


def measured(
    config: Config, processes: Sequence[placement.ProcessGroup], host: Host
) -> dict[int, float]:
    """Return the memory of used GPUs that have less than hardware.memory_gb.

    It is in 1e9 bytes, by index of the GPU.
    """
    gpus = host.gpus_of(config.hardware.vendor)
    indices = sorted({gpu for process in processes for gpu in process.gpus})
    return {
        i: gpus[i].memory_gb or 0.0
        for i in indices
        if i < len(gpus) and is_smaller(gpus[i], config.hardware)
    }


def host_gb(config: Config, host: Host) -> float | None:
    """Return the memory of this machine that a node of the run may use; None on another machine."""
    vendor, runtime = config.hardware.vendor, config.runtime
    is_here = vendor == Vendor.none or bool(host.gpus_of(vendor))
    total = sysfs.total_memory(host.sysroot)
    if runtime.name in ("slurm", "kubernetes") or not is_here or total is None:
        return None
    return min(total / 1e9, runtime.memory_gb or math.inf)


def memory(
    config: Config,
    processes: Sequence[placement.ProcessGroup],
    smaller: Mapping[int, float] = {},
    ram_gb: float | None = None,
) -> list[Memory]:
    """Return one entry per process and GPU, and one for offloaded parts if `ram_gb` is known.

    `smaller` and `ram_gb` are the results of `measured` and `host_gb`.
    """
    topology, nominal = config.topology, capacity_gb(config)
    on_cpu = config.hardware.vendor == Vendor.none
    if on_cpu and ram_gb:
        nominal = ram_gb
    entries: list[Memory] = []
    for process in processes:
        if process.kind in UNPLANNED:
            continue
        serves = process.kind in ("server", "service") or value_or_none(config, "engine") == "vllm"
        capacity = min([nominal, *(smaller[gpu] for gpu in process.gpus if gpu in smaller)])
        if serves:
            moment, parts, scattered = "", _server_parts(config, capacity), 0.0
        else:
            moment, parts = _rank_parts(config, capacity)
            scattered = _scattered_bytes(config) / 1e9
        # vLLM does not use memory outside its share, even if its weights need more.
        if serves and not topology.server_cache_gb:
            capacity *= topology.server_memory_share
        if placement.shares_gpu(config):
            capacity = max(0.0, capacity - sum(other.total_gb for other in entries))
        gpus: list[int | None] = [*process.gpus] or [None]
        rest = (parts, capacity, moment, scattered, error_of(config))
        entries += [Memory(process.name, gpu, *rest) for gpu in gpus]
    if not on_cpu and ram_gb and (parts := offloaded_gb(config)):
        entries.append(Memory(HOST, None, parts, ram_gb, error=0.0))
    return entries


def offloaded_gb(config: Config) -> dict[str, float]:
    """Return the GB that a node's host stores for its ranks, in parts. {} without offload."""
    parts = rank_state.offloaded_bytes(config) if config.method.trains else {}
    return {name: size / 1e9 for name, size in parts.items()}


def on_host(config: Config, host: Host) -> list[Memory]:
    """Return the memory entries of a composition on a host. Raises HostError."""
    processes = placement.process_groups(config, host)
    return memory(config, processes, measured(config, processes, host), host_gb(config, host))


def _server_parts(config: Config, capacity: float) -> dict[str, float]:
    """Return the parts of vLLM, which fills its share of the GPU, in 1e9 bytes.

    The KV cache uses the memory that the weights leave, but needs at least one sequence of full
    length (vllm.v1.core.kv_cache_utils). `context` includes graphs and the tensors of a batch.
    """
    topology, on_cpu = config.topology, config.hardware.vendor == Vendor.none
    weights = (
        engine_args.weights_gb(config, rank_state.width(config)) / topology.server_tensor_parallel
    )
    free_gb = topology.server_memory_share * capacity - OVERHEAD_GB - weights
    # On a CPU the cache has a fixed size.
    cache = CPU_CACHE_GIB * GIB if on_cpu else max(free_gb, longest_served_gb(config))
    context = CPU_OVERHEAD_GB if on_cpu else OVERHEAD_GB
    return {"weights": weights, "kv cache": topology.server_cache_gb or cache, "context": context}


def longest_served_gb(config: Config) -> float:
    """Return the GB of keys and values of one full-length sequence, per GPU of a server.

    vLLM does not start with a smaller cache.
    """
    longest = config.topology.server_max_length or config.model.max_positions
    # vLLM replicates heads if there are fewer heads than GPUs.
    heads = max(1.0, config.model.num_kv_heads / config.topology.server_tensor_parallel)
    width = engine_args.cache_width(config, rank_state.width(config))
    return heads * longest * shapes.head_bytes(config.model, width) / 1e9


def engine_fits(config: Config, engine: Mapping[str, Any]) -> bool:
    """Return whether vLLM starts with `engine`'s arguments, as bench/vllm passes them."""
    topology = dataclasses.replace(
        config.topology,
        server_memory_share=float(engine.get("gpu_memory_utilization") or 0.9),
        server_max_length=engine.get("max_model_len"),
        server_tensor_parallel=int(engine.get("tensor_parallel_size") or 1),
        server_args={name: engine.get(name) for name in ("quantization", "kv_cache_dtype")},
    )
    config, capacity = dataclasses.replace(config, topology=topology), capacity_gb(config)
    needed = sum(_server_parts(config, capacity).values())
    return needed <= topology.server_memory_share * capacity


def capacity_gb(config: Config) -> float:
    """Return the memory of a GPU that a run may use, in 1e9 bytes."""
    system = SYSTEM_GB if config.hardware.unified_memory else 0.0
    return config.hardware.memory_gb * GIB - system


def _rank_parts(config: Config, capacity: float) -> tuple[str, dict[str, float]]:
    """Return the moment of a rank's peak memory, and the parts of the peak in 1e9 bytes."""
    overhead = CPU_OVERHEAD_GB if config.hardware.vendor == Vendor.none else OVERHEAD_GB
    if not config.method.trains:
        rows = batch(config).per_device * int(value_or_none(config, "samples_per_prompt") or 1)
        parts = {
            "weights": rank_state.base_bytes(config),
            **rank_memory.generating_bytes(config, rows),
        }
        return "", {**{name: size / 1e9 for name, size in parts.items()}, "context": overhead}
    state, moments = rank_state.state(config), rank_memory.moments(config)
    if config.topology.name == "colocate":
        vllm = {"vllm": float(value(config, "vllm_gpu_memory_utilization")) * capacity * 1e9}
        if value(config, "vllm_enable_sleep_mode"):  # frees its memory during training
            moments["generation"] = vllm
        else:
            state |= vllm
    peaks = {
        **rank_memory.preparation(config),
        **{name: {**state, **parts} for name, parts in moments.items()},
    }
    moment, peak = max(peaks.items(), key=lambda item: sum(item[1].values()))
    parts = {name: size / 1e9 for name, size in peak.items() if size}
    return moment, {**parts, "context": overhead}


def _scattered_bytes(config: Config) -> float:
    """Return an upper bound of the bytes that a trainer does not use, but cannot reuse either.

    It is free memory in pieces that are too small. A CPU has no such pieces, nor has torch's
    allocator if it maps pages, which some versions of ROCm do not support (pytorch#173330).
    max_split_size_mb helps only at some sizes.
    """
    options = next((config.user_env[name] for name in ALLOCATOR if name in config.user_env), "")
    maps_pages = is_expandable(options) or "cudamallocasync" in options.lower()
    vendor = config.hardware.vendor
    if not config.method.trains or vendor == Vendor.none:
        return 0.0
    if maps_pages and vendor == Vendor.nvidia:
        return 0.0
    return micro_step(config, batch(config)).scattered()
