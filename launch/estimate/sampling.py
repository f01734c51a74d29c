"""Predict the speed of method=sample, by transformers or by vLLM in the rank's process.

Its memory is an evaluation's.
"""

from __future__ import annotations

import math

from launch.estimate.activations import Numerics
from launch.estimate.batch import batch
from launch.estimate.speed import DECODE_BANDWIDTH, DECODE_S, KERNEL_S, TRAFFIC, at_once_of
from launch.inputs import engine_args
from launch.machine.placement import num_gpus
from launch.schema import Config
from launch.schema.plan import Speed
from launch.schema.trainer_args import argument, value


def speed(config: Config) -> Speed:
    """Predict new tokens per second of all ranks, and seconds per batch of full-length samples.

    Prompts are not counted.
    """
    model, size, vllm = config.model, batch(config), argument(config, "engine") == "vllm"
    rows = size.per_device * int(value(config, "samples_per_prompt"))
    width = 4.0 if config.precision.compute == "fp32" else 2.0
    read_s = engine_args.weights_gb(config, width) / (
        DECODE_BANDWIDTH * config.hardware.bandwidth_gb_s
    )
    # As for a generation in training (launch/estimate/speed.py): transformers starts every kernel
    # of a forward for every token.
    start_s = (
        DECODE_S
        if vllm
        else model.num_layers * TRAFFIC[Numerics.cast, False].kernels / 3 * KERNEL_S
    )
    waves = max(1.0, rows / at_once_of(config)) if vllm else 1.0
    step_s = max(read_s, start_s) * int(value(config, "max_new_tokens")) * waves
    tokens = size.ranks * rows * int(value(config, "max_new_tokens"))
    prompts = min(
        (
            int(n)
            for n in (argument(config, "num_prompts"), config.data.limit, config.data.num_train)
            if n
        ),
        default=None,
    )
    hours = (
        None
        if prompts is None
        else math.ceil(prompts / size.per_device / size.ranks) * step_s / 3600
    )
    price = config.price_per_gpu_hour
    cost = (
        None
        if price is None or hours is None
        else price * num_gpus(config) * config.runtime.slurm.nodes * hours
    )
    limit = (
        "reading weights"
        if read_s >= start_s
        else "starting kernels"
        if not vllm
        else "vLLM's steps"
    )
    basis = (
        f"{'vLLM' if vllm else 'transformers'} at best, bound by {limit}, samples of full "
        "length; shares measured on an H200"
    )
    return Speed(tokens / step_s, step_s, basis, hours, cost)
