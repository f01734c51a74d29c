"""Reject values outside a range or a list of options that depends on other settings."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from containers import images
from launch.config.row_reward import judging
from launch.core.json_files import yaml_file
from launch.estimate.batch_counts import min_staleness
from launch.estimate.memory import longest_served_gb
from launch.machine import placement
from launch.rules.refusal import Refusal
from launch.rules.topology import has_vllm, lengths, longest
from launch.schema import TOPOLOGIES, Config, trainer_args
from launch.schema.checked import MAX_RANKS, Range
from launch.schema.enums import Rows, Vendor
from launch.schema.trainer_args import known, value_or_none

ROWS: dict[str, dict[str, Any]] = yaml_file(Path(__file__).with_name("limits.yaml"))
MAX_OPTIONS = 8  # in a remedy, which shows the first 3 of a longer list
SHARDED = ("ddp", "fsdp", "zero2", "zero3")
# rule, value, and the allowed range or options; a value of None is not checked
Limit = tuple[str, Any, Range | Collection[Any]]


def limit_problems(c: Config) -> Iterator[Refusal]:
    limits = (_model_and_data_limits, _topology_limits, _server_limits, _runtime_limits)
    for rule, value, allowed in (limit for of_subject in limits for limit in of_subject(c)):
        if value is None or value in allowed:
            continue
        longest_argument = max(lengths(c), key=lengths(c).__getitem__, default="")
        half = next((name for name in ("bf16", "fp16") if name in c.hardware.precisions), "fp32")
        values = {"length": longest_argument, "config": c, "value": value}
        values["without_nf4"] = f"adapter=lora precision={half} precision.weights={half}"
        row = {}
        for name, cell in ROWS[rule].items():
            text = cell.get(value, cell.get("else", "")) if isinstance(cell, dict) else cell
            row[name] = str(text).format(**values)
        key = row["key"]
        remedy = row.get("instead") or _remedies(value, allowed, row.get("option", f"{key}=*"))
        remedies = filter(None, (remedy, row.get("use")))  # no option may be left
        yield Refusal(rule, f"{key}={value}: {row['why']}", "; or ".join(remedies))


def _remedies(value: Any, allowed: Range | Collection[Any], override: str) -> str:
    """Return the override with the nearest allowed value, or with several options."""
    if isinstance(allowed, Range):
        low, high = allowed.minimum, allowed.maximum
        nearest = math.ceil(low) if value < low else math.floor(high)
        bounds = f" ({allowed})" if low < high else ""
        return override.replace("*", str(nearest)) + bounds
    options = list(map(str, allowed))
    if not override.endswith("=*"):
        options.sort(key=lambda option: -SequenceMatcher(None, str(value), option).ratio())
    if len(options) > MAX_OPTIONS:
        return " or ".join([*(override.replace("*", option) for option in options[:3]), "another"])
    return " or ".join(override.replace("*", option) for option in options)


def _model_and_data_limits(c: Config) -> Iterator[Limit]:
    data, method, metrics = c.data, c.method, c.method.held_out_metrics
    yield "precision", c.precision.name, c.hardware.precisions
    length = longest(c) if method.uses_model else None
    yield "sequence_length", length, Range(maximum=c.model.max_positions)
    heads, kv_heads, width = c.model.num_heads, c.model.num_kv_heads, c.model.head_dim
    if method.uses_model and heads % kv_heads:
        yield "kv_heads", kv_heads, [n for n in range(1, kv_heads) if heads % n == 0]
    yield "head_dim", width if method.uses_model else None, [width - width % 2, width + width % 2]
    layers = Range(minimum=1, maximum=c.model.num_layers)
    yield "checkpointed_layers_range", c.step.checkpointed_layers, layers
    layouts = [layout.name for layout in (*method.row_layouts, Rows.padded)]
    rows = c.step.rows.name if c.step.rows and method.trains else None
    yield "rows_of_method", rows, layouts
    if c.hardware.packed_attention is None and rows in layouts:
        yield "rows_of_gpu", rows, [name for name in layouts if name != "packed"]
    excluded = "code" if method.rows == "dpo" else "samples"
    kinds = ("reasoning", "code", "jsonl", "hub", "mix", "samples")
    yield "data_of_method", data.kind, [kind for kind in kinds if kind != excluded]
    # Otherwise, a stream would be searched forever.
    yield "filter_lengths", data.filter.max_tokens, Range(minimum=data.filter.min_tokens or 0)
    if method.has_cycles:  # their evaluations measure one of the two (recipes/evaluate.py)
        metrics = {"accuracy" if judging(method.rewards) else "reward": True}
    yield "selection_metric", method.selection.metric if metrics else None, metrics
    if method.selection.metric and (evaluated := value_or_none(c, "eval_steps")):
        yield "eval_steps", evaluated, _steps_between_saves(float(value_or_none(c, "save_steps")))
    losses, smoothing = value_or_none(c, "loss_type") or (), value_or_none(c, "label_smoothing")
    for loss, allowed in {"robust": Range(below=0.5), "exo_pair": Range(above=0)}.items():
        yield f"smoothing_of_{loss}", smoothing if loss in losses else None, allowed
    lock = trainer_args.lock()
    for name in method.rewards:
        yield "reward_unknown", None if "." in name else name, lock["rewards"]
    for task in data.tasks if data.kind in lock["tasks"] else ():
        yield "task", task.name, lock["tasks"][data.kind]


def _steps_between_saves(save_steps: float) -> list[float]:
    """Return the values of eval_steps with which every saved model is evaluated."""
    if save_steps < 1:  # a share of all steps
        return [save_steps / n for n in range(1, MAX_OPTIONS + 1)]
    return [n for n in range(int(save_steps), 0, -1) if save_steps % n == 0]


def _topology_limits(c: Config) -> Iterator[Limit]:
    name, method, strategy = c.topology.name, c.method, c.topology.strategy
    # Trainers that do not generate have fewer topologies.
    serves = method.generates or not method.trains
    default = [name for name in TOPOLOGIES if serves or name not in ("split", "colocate")]
    yield "topology_of_method", name, method.topologies or default
    sharding = name if name == "colocate" or strategy == "none" else strategy
    if method.trains and c.precision.weights == "nf4":
        yield "topology_of_nf4", sharding, {*TOPOLOGIES} - {"fsdp", "zero3", "colocate"}
    if method.trains and c.precision.compute == "fp8":
        yield "topology_of_fp8", sharding, {*TOPOLOGIES} - {"zero3"}
    gpus = placement.num_gpus(c)
    strategies: tuple[str, ...] = SHARDED
    if name == "single" or (name == "colocate" and gpus == 1):
        strategies = ("none",)
    elif name not in ("split", "colocate"):
        strategies = (name,)
    yield "strategy_of_topology", strategy, strategies
    num_gpus, node = c.topology.num_gpus, Range(minimum=1, maximum=c.hardware.gpus_per_node)
    yield "num_gpus", None if c.hardware.vendor == Vendor.none else num_gpus, node
    yield "single_is_one", num_gpus if name == "single" else None, Range(minimum=1, maximum=1)
    spans = name in SHARDED or name == "split"
    nodes = c.runtime.slurm.nodes if c.runtime.name == "slurm" else None
    yield "slurm_nodes", nodes, Range(minimum=1, maximum=MAX_RANKS if spans else 1)


def _server_limits(c: Config) -> Iterator[Limit]:
    topology, heads = c.topology, c.model.num_heads
    is_service, gpus = c.method.kind == "service", placement.num_gpus(c)
    if topology.name == "split" or has_vllm(c) or is_service:
        yield "server_cache", topology.server_cache_gb, Range(minimum=longest_served_gb(c))
        server_lengths = Range(minimum=longest(c) + 1, maximum=c.model.max_positions)
        yield "server_length", topology.server_max_length, server_lengths
    if topology.name != "split" and not is_service:
        return
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    yield "server_heads", topology.server_tensor_parallel, divisors
    if is_service:
        widths = [n for n in range(1, gpus + 1) if gpus % n == 0]
        yield "service_gpus", topology.server_tensor_parallel, widths
        return
    yield "split_needs_a_server", topology.servers, Range(minimum=1)
    if topology.overlap == "stream" and "num_generations" in known(c):
        yield "staleness_of_stream", topology.max_staleness, Range(minimum=min_staleness(c))


def _runtime_limits(c: Config) -> Iterator[Limit]:
    trl, on_cpu = trainer_args.lock()["trl"], c.hardware.vendor == Vendor.none
    images_of_gpu = [
        image.name
        for image in images.load().values()
        if image.trl == trl and (on_cpu or c.hardware.gfx in image.gfx)
    ]
    if c.runtime.on_node != "local" and c.container.name != "custom":
        yield "image", c.container.name, images_of_gpu
    if c.runtime.name == "slurm":
        after_save = Range(minimum=c.runtime.stop_timeout_s + 1, maximum=65535)
        yield "slurm_early_signal", c.runtime.slurm.early_signal_s, after_save
