"""Predict the time of a training step with a roofline model.

The parts are matrix products, attention, memory-bound kernels, optimizer, links and generation.
Their work follows from shapes. Each part reaches a share of the GPU's peak or bandwidth, which was
measured on H200s in the runs of docs/results/speed.md. Other GPUs are assumed to reach the same
shares, and `basis` records this assumption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launch.estimate import adapter_layers
from launch.estimate.activations import MicroStep, Numerics, micro_step
from launch.estimate.batch_counts import Batch, batch, batch_of_rows, generation_batch
from launch.estimate.rank_state import (
    generates_with_vllm,
    has_reference,
    optimizer_width,
    uses_reference,
    width,
)
from launch.estimate.run_length import num_heldout, num_passes, num_rows, num_steps
from launch.estimate.traffic import TRAFFIC, traffic
from launch.inputs import engine_args
from launch.machine import placement
from launch.machine.placement import shares_gpu
from launch.schema import Config, shapes
from launch.schema.enums import Head, Link, Vendor
from launch.schema.plan import Speed
from launch.schema.trainer_args import eval_batch_size, value, value_or_none

# Shares of peak and bandwidth, from the runs of docs/results/speed.md. 16-bit products reach
# healthy.gemm of the hardware file.
GEMM_FP32 = 0.69  # of the fp32 peak, for products and attention
ATTENTION = 0.67  # of the peak, for fused 16-bit kernels
# of the bandwidth, for the memory-bound kernels of a layer; long series of large tensors (weights,
# optimizer) reach healthy.copy
BANDWIDTH = 0.62
COPY, LINKS = 0.89, 0.7  # if the hardware file lacks healthy.copy or healthy.all_reduce
KERNEL_S = 6e-6  # time to start and end a kernel that moves no data
STEP_S = 0.03  # time per step without a running kernel: collating, gathering metrics, logging
# Times of the host, which matter only if the GPU has to wait. LAUNCH_S is the time to launch a
# kernel (Python, autograd, autocast, the driver), measured with 0.6B and one row of 512 tokens. The
# others are times per layer and micro-step, for Python hooks around layers or parameters.
LAUNCH_S = 30e-6
FSDP_LAYER_S = 6.6e-3
ZERO3_LAYER_S, ZERO3_WEIGHT_S = 11.7e-3, 0.2e-9  # per layer, and per weight of the layer
ZERO2_LAYER_S = 1.35e-3  # always added, because gradients are copied into buckets one by one
# Host's time of vLLM 0.26 to decode one token of all sequences: a constant, and a part per sequence
# in a server and in a trainer's process, to which text adds. Fitted to machines with H200s
# (docs/results/speed.md).
DECODE_S, DECODE_SERVED_S, DECODE_HERE_S, DECODE_TEXT_S = 1.05e-3, 0.034e-3, 0.045e-3, 0.035e-3
# The rest of a server's time per generated token, fitted as well. It is not divided by the number
# of servers, because one process reads the answers. A stream decodes others meanwhile.
ANSWER_TOKEN_S = 6e-6
# Share of the bandwidth to read weights and caches for a token, if this takes longer. With 4B and
# 96 x (200 + 512) tokens, kernels keep an H100 busy for 6.7 of 7.0 ms, and a wave of completions
# takes 4.1 s (2026-11-27).
DECODE_BANDWIDTH = 0.6
# completions that a server decodes concurrently, unless topology.server_args.max_num_seqs is set
SERVER_SEQUENCES = 256
SYNC_S, SYNC_GB_S = 0.14, 134.0  # to send weights to a server
# the same through host memory: 0.4 s for 76 million parameters, in three concurrent runs on an H200
GLOO_GB_S = 0.6
# tensors moved per trained tensor: fused AdamW reads four and writes three; clipping reads two and
# writes one
ADAM_TENSORS = 7 + 3
# Factors of healthy.gemm for compiled layers. Their products follow each other closely, so they
# draw more power, which lowers the clocks. An H100 then reaches 0.69 of its peak instead of 0.75
# (same rows). In fp8 it reaches 0.61 of the fp8 peak.
BUSY, BUSY_FP8 = 0.92, 0.82
# Seconds that compilation adds to the start of a run. Layers share one graph, so their number does
# not matter. With 4B on an H100, empty caches and rehearsed lengths, the first step ended 19 to 25
# s later than TRL's, which compiles nothing (2026-11-26).
COMPILE_S = 22.0


def estimate_speed(config: Config, rows: Mapping[str, Any] | None = None) -> Speed:
    """Predict the tokens per second of all ranks, and the seconds per step.

    `rows` are the statistics of the prepared rows. Without them, every row has the maximum length.
    """
    compute = config.precision.compute
    peak = config.hardware.peak_tflops.get(compute)
    if peak is None:
        return Speed(None, None, f"the {compute} peak of {config.hardware.name} is unknown")
    if not config.method.trains:
        return Speed(None, None, f"no estimate for {config.method.name} yet")
    fsdp, zero = config.topology.fsdp, config.topology.zero
    if fsdp.cpu_offload or zero.offload_optimizer or zero.offload_parameters:
        return Speed(
            None, None, "steps with offload depend on the host's optimizer and links, not estimated"
        )
    size, filled = batch_of_rows(config, rows) if rows else (batch(config), 1.0)
    parts = step_parts(config, size, peak * 1e12)
    train_s, generate_s = sum(parts.values()) - parts["generation"], parts["generation"]
    step_s = max(train_s, generate_s) if config.topology.overlap else train_s + generate_s
    basis = "measured shares of an H200's peak and bandwidth"
    if config.hardware.name != "h200":
        basis += f", assumed for {config.hardware.name}"
    if config.runtime.slurm.nodes > 1:
        basis += "; links between nodes assumed as fast as those within a node"
    if size.completion and not generates_with_vllm(config):
        basis += "; an upper bound, because transformers generates"
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    basis = f"{basis}: {', '.join(f'{name} {part / step_s:.0%}' for name, part in largest)}"
    steps = num_steps(config, size, rows)
    passes, pass_s = num_passes(config, steps), None
    if passes:
        pass_s = _held_out_s(config, size, peak * 1e12)
    hours = (steps * step_s + passes * (pass_s or 0.0)) / 3600 if steps else None
    generates = size.completion > 0
    tokens = size.tokens * config.method.sequences_per_example * filled
    units = size.sequences / 1e3 if config.method.generates else tokens / 1e6
    return Speed(
        tokens / step_s,
        step_s,
        basis,
        hours,
        _cost(config, hours),
        unit_cost=_cost(config, step_s / 3600 / units),
        generation_s=generate_s if generates else None,
        training_s=train_s if generates else None,
        steps=steps,
        parts_s=parts,
        is_upper_bound=rows is None or generates,
        passes=passes,
        pass_s=pass_s,
    )


def _held_out_s(config: Config, size: Batch, peak: float) -> float | None:
    """Return the seconds of a pass over the held-out rows; None if their number is unknown.

    A forward takes a third of a micro-step without recomputation.
    """
    rows = num_heldout(config)
    if rows is None:
        return None
    micro_s = sum(micro_parts(config, micro_step(config, size), peak).values())
    completions = rows * int(value_or_none(config, "num_generations_eval") or 1)
    pass_s = math.ceil(completions / size.ranks) / size.per_device * micro_s / 3
    if size.completion:
        per_batch = size.ranks * eval_batch_size(config)
        batch_rows = per_batch / (config.topology.servers or size.ranks)
        is_vllm = generates_with_vllm(config)
        batch_s = _completion_s(config, size, batch_rows, peak, is_vllm)
        pass_s += math.ceil(completions / per_batch) * batch_s
    return pass_s


def _cost(config: Config, hours: float | None) -> float | None:
    price = config.price_per_gpu_hour
    gpus = placement.num_gpus(config) * config.runtime.slurm.nodes
    return None if price is None or hours is None else price * gpus * hours


def sampling(config: Config) -> Speed:
    """Predict the speed of an evaluation or of method=sample, for samples of full length.

    Return new tokens per second of all ranks, without prompts, and seconds per batch.
    """
    peak = config.hardware.peak_tflops.get(config.precision.compute)
    if peak is None:
        return Speed(None, None, f"the {config.precision.compute} peak is unknown")
    size = replace(batch(config), completion=int(value(config, "max_new_tokens")))
    rows = size.per_device * int(value(config, "samples_per_prompt"))
    is_vllm = value_or_none(config, "engine") == "vllm"
    step_s = _completion_s(config, size, rows, peak * 1e12, is_vllm)
    tokens = size.ranks * rows * size.completion
    prompts = num_heldout(config)
    if config.method.leaves_samples:
        prompts = num_rows(config, value_or_none(config, "num_prompts"))
    steps = math.ceil(prompts / size.per_device / size.ranks) if prompts else None
    hours = steps * step_s / 3600 if steps else None
    basis = f"{'vLLM' if is_vllm else 'transformers'}, samples of full length; shares of an H200"
    cost = _cost(config, hours)
    return Speed(tokens / step_s, step_s, basis, hours, cost, steps=steps, is_upper_bound=True)


def _forward_start_s(config: Config) -> float:
    """Return the seconds that transformers needs to start the kernels of one token.

    A forward starts a third of the kernels of forward and backward.
    """
    return config.model.num_layers * TRAFFIC[Numerics.cast, False].kernels / 3 * KERNEL_S


def step_parts(config: Config, size: Batch, peak: float) -> dict[str, float]:
    """Return the seconds of a rank's step by kind of work. `peak` is in operations per second."""
    step = micro_step(config, size)
    micro = micro_parts(config, step, peak)
    parts = {name: size.accumulation * part for name, part in micro.items()}
    copying = config.hardware.bandwidth_gb_s * 1e9 * (config.hardware.healthy.copy or COPY)
    sharded = size.ranks if config.topology.strategy in ("fsdp", "zero2", "zero3") else 1
    trained = adapter_layers.trainable_parameters(config.model, config.adapter)
    parts["optimizer"] = ADAM_TENSORS * optimizer_width(config) * trained / sharded / copying
    is_low = config.precision.weights in ("bf16", "fp16")
    element = 2 if is_low and config.topology.strategy in ("none", "ddp") else 4
    # To accumulate a gradient, two tensors are read and one is written.
    parts["weights"] += 3 * element * trained * (size.accumulation - 1) / copying
    if config.topology.strategy == "ddp" and size.ranks > 1:
        # DDP's buckets are zeroed, and the first micro-batch is added to them.
        parts["weights"] += (
            4 * optimizer_width(config) * trained / (config.hardware.bandwidth_gb_s * 1e9 * COPY)
        )
    parts["between steps"] = STEP_S
    parts["waiting for the host"] = _host_wait_s(config, size, micro, parts["optimizer"])
    parts["communication"] = _communication_s(config, size, sum(micro.values()))
    parts["generation"] = _generation_s(config, size, peak)
    return parts


def micro_parts(config: Config, step: MicroStep, peak: float) -> dict[str, float]:
    """Return the seconds of forward and backward of a micro-step, by kind of work.

    `peak` is in operations per second.
    """
    model, tokens = config.model, step.tokens
    trains_base = config.adapter.rank is None
    linear = model.num_layers * shapes.active_linear_parameters(model)
    passes = 1 + step.recomputed_share + (2 if trains_base else 1)
    # TRL's head recomputes logits in the backward.
    head = (3 if trains_base else 2) + (step.head is Head.tiled)
    products = 2.0 * tokens * (passes * linear + head * model.vocab_size * model.hidden_size)
    forwards = extra_forwards(config)
    products += forwards * 2.0 * tokens * (linear + model.vocab_size * model.hidden_size)
    scores = (
        2.0
        * tokens
        * step.length
        * model.num_layers
        * step.widths[2]
        * (1 + step.recomputed_share + 2.5 + forwards)
    )
    bandwidth = config.hardware.bandwidth_gb_s * 1e9
    head_products = (head + forwards) * 2.0 * tokens * model.vocab_size * model.hidden_size
    gemm, attention = _products_per_second(config, step, peak)
    # With fp8, the head is still in 16 bits.
    half = config.hardware.peak_tflops["bf16"] * 1e12 if config.precision.compute == "fp8" else peak
    head_gemm = gemm if half == peak else half * (config.hardware.healthy.gemm or 1.0)
    all_linear = model.num_layers * shapes.linear_parameters(model)  # all experts are cast
    moved, weights, kernels = traffic(config, step, all_linear, forwards)
    return {
        "matrix products": (products - head_products) / gemm + head_products / head_gemm,
        "attention": scores / attention,
        "memory-bound kernels": moved / (bandwidth * (config.hardware.healthy.layers or BANDWIDTH)),
        "weights": weights / (bandwidth * (config.hardware.healthy.copy or COPY)),
        "starting kernels": kernels * KERNEL_S,
    }


def _products_per_second(config: Config, step: MicroStep, peak: float) -> tuple[float, float]:
    """Return the operations per second of the layers' matrix products and of attention.

    With fp8, attention is still in 16 bits.
    """
    if step.numerics is Numerics.fp32:
        return peak * GEMM_FP32, peak * GEMM_FP32
    gemm = peak * (config.hardware.healthy.gemm or 1.0)
    if config.precision.compute == "fp8":
        return gemm * BUSY_FP8, config.hardware.peak_tflops["bf16"] * 1e12 * ATTENTION
    return gemm * (BUSY if step.compiled else 1.0), peak * ATTENTION


def extra_forwards(config: Config) -> float:
    """Return the number of forwards without gradients per forward with gradients.

    A reference model needs one. GRPO needs another one if it rescores completions. Both are used
    for num_iterations of training.
    """
    reference = uses_reference(config) and not value_or_none(config, "precompute_ref_log_probs")
    if not config.method.generates:
        return float(reference)
    iterations = int(value(config, "num_iterations"))
    return (reference + rescores_completions(config)) / iterations


def rescores_completions(config: Config) -> bool:
    """Return whether a step may train on completions of older weights.

    TRL then computes their probabilities under the older weights in a separate forward. This does
    not happen if each step trains on complete generations.
    """
    size = batch(config)
    micro_steps = max(1, generation_batch(config) // (size.per_device * size.ranks))
    return size.accumulation % (micro_steps * int(value(config, "num_iterations"))) != 0


def _host_wait_s(config: Config, size: Batch, micro: dict[str, float], optimizer_s: float) -> float:
    """Return the seconds per step that a GPU waits for the host.

    The host launches kernels and runs the hooks of a strategy, while the GPU works.
    """
    strategy, layers = config.topology.strategy, size.accumulation * config.model.num_layers
    if config.hardware.vendor == Vendor.none:
        return 0.0
    kernels = size.accumulation * micro["starting kernels"] / KERNEL_S
    zero3 = (ZERO3_LAYER_S + ZERO3_WEIGHT_S * shapes.layer_parameters(config.model)) * (
        1 + extra_forwards(config) / 3
    )
    hooks = {"fsdp": FSDP_LAYER_S, "zero3": zero3}.get(strategy, 0.0)
    has_ranks = size.ranks > 1
    host_s = kernels * LAUNCH_S + has_ranks * layers * hooks
    wait_s = max(0.0, host_s - size.accumulation * sum(micro.values()) - optimizer_s)
    return wait_s + (layers * ZERO2_LAYER_S if has_ranks and strategy == "zero2" else 0.0)


def _communication_s(config: Config, size: Batch, micro_s: float) -> float:
    """Return the seconds per step to reduce gradients and to gather weights.

    DDP overlaps the reduction with half of the last micro-step. Other strategies do not overlap.
    """
    strategy, n = config.topology.strategy, size.ranks
    if n == 1 or config.hardware.vendor == Vendor.none or not config.hardware.link_gb_s:
        return 0.0
    model = config.model
    trained = adapter_layers.trainable_parameters(model, config.adapter)
    share = config.hardware.healthy.all_reduce or LINKS
    link = config.hardware.link_gb_s * 1e9 * share
    hive = config.hardware.hive or config.hardware.gpus_per_node
    if config.hardware.hives_gb_s and n > hive:
        link = config.hardware.hives_gb_s * 1e9 * share
    elif config.hardware.link == Link.xgmi:
        # There is one link to each other GPU, so fewer GPUs use fewer links (ROCm/rccl#1270).
        link *= min(1.0, (n - 1) / (hive - 1)) if hive > 1 else 1.0
    if strategy not in ("fsdp", "zero2", "zero3"):
        return max(0.0, 2 * (n - 1) / n * optimizer_width(config) * trained / link - micro_s / 2)
    low = width(config)
    gathered = (n - 1) / n * low * model.num_parameters / link  # to gather all weights once
    if strategy == "zero2":
        # Reduces gradients in every micro-step, in 16 bits except on AMD, and gathers the updated
        # weights once.
        element = 4.0 if config.hardware.vendor == Vendor.amd else low
        return (
            size.accumulation * 2 * (n - 1) / n * element * trained / link
            + gathered * trained / model.num_parameters
        )
    reference = has_reference(config)
    # A forward and a backward gather, and so does the forward of the reference. Weights that are
    # not resharded are gathered once per step.
    reshards = strategy == "zero3" or config.topology.fsdp.reshard_after_forward
    gathers = (2 * size.accumulation if reshards else 1) + size.accumulation * reference
    reduced = (n - 1) / n * 4.0 * trained / link
    return gathers * gathered + reduced


def max_concurrent(config: Config) -> int:
    """Return the number of completions that a vLLM engine decodes concurrently."""
    return int(config.topology.server_args.get("max_num_seqs") or SERVER_SEQUENCES)


def _generation_s(config: Config, size: Batch, peak: float) -> float:
    """Return the seconds per step to send weights to a server and to generate completions."""
    if not size.completion:
        return 0.0
    engines = config.topology.servers or size.ranks
    completions = generation_batch(config)
    sync_s = 0.0
    if config.topology.servers:
        weights_gb = 2.0 * config.model.num_parameters / 1e9
        sync_s = SYNC_S + weights_gb / (GLOO_GB_S if shares_gpu(config) else SYNC_GB_S)
    generation_s = (
        _completion_s(config, size, completions / engines, peak, generates_with_vllm(config))
        + sync_s
    )
    # One generation provides for several steps.
    return generation_s * size.sequences / completions / int(value(config, "num_iterations"))


def _completion_s(config: Config, size: Batch, rows: float, peak: float, is_vllm: bool) -> float:
    """Return the seconds in which an engine completes `rows` prompts to full length.

    A decoded token reads all weights, and the keys and values of all running sequences, which are
    half complete on average.
    """
    model, gpus = config.model, config.topology.server_tensor_parallel
    concurrent = min(rows, max_concurrent(config)) if is_vllm else rows
    element = 2.0 if is_vllm else width(config)
    prompt = size.sequence - size.completion
    cached = concurrent * (prompt + size.completion / 2) * model.num_kv_heads
    read_gb = engine_args.weights_gb(config, element)
    read_gb += cached * shapes.head_bytes(model, engine_args.cache_width(config, element)) / 1e9
    read_s = read_gb / gpus / (DECODE_BANDWIDTH * config.hardware.bandwidth_gb_s)
    start_s = _forward_start_s(config)
    if is_vllm:
        sequence_s = DECODE_SERVED_S if config.topology.servers else DECODE_HERE_S
        if not placement.is_tokens_only(config):
            sequence_s += DECODE_TEXT_S
        start_s = DECODE_S + sequence_s * concurrent
    linear = model.num_layers * shapes.active_linear_parameters(model)
    gemm = peak * (config.hardware.healthy.gemm or 1.0)
    prefill_s = 2.0 * linear * prompt * rows / gpus / gemm
    answering = 0 if config.topology.overlap == "stream" else config.topology.servers
    answer_s = ANSWER_TOKEN_S * size.completion * rows * answering
    return max(start_s, read_s) * size.completion * rows / concurrent + prefill_s + answer_s
