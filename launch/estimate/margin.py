"""Warn of plans that are close to the memory limit, and of settings that the planner ignores."""

from __future__ import annotations

import dataclasses

from launch.estimate.batch_counts import UNCUT_TOKENS, batch
from launch.estimate.memory import GENERIC_ERROR, on_host
from launch.estimate.rank_state import (
    BITSANDBYTES_8_BIT,
    OPTIMIZERS,
    TORCHAO_8_BIT,
    generates_with_vllm,
)
from launch.machine.detect import Host
from launch.schema import Config, Hardware, shapes
from launch.schema.enums import Vendor
from launch.schema.plan import Memory
from launch.schema.trainer_args import known, value, value_or_none

BATCHES = ("per_device_train_batch_size", "batch_size")  # for training, for inference
LENGTHS = ("max_length", "max_completion_length", "max_new_tokens")
# The most memory that a published run on a GPU that we never measured took, in its plan's
# (docs/results/memory.md). The margin of such GPUs, Hardware.memory_error, is smaller.
WORST_PUBLISHED = 1.35


def share(entry: Memory) -> float:
    """Return the planned share of the capacity."""
    return entry.total_gb / entry.capacity_gb if entry.capacity_gb else float("inf")


def fills_capacity(entry: Memory) -> bool:
    """Return whether the process uses all of its capacity by design, as vLLM does."""
    return "kv cache" in entry.parts_gb


def most_gb(entry: Memory) -> float:
    """Return the plan with the planner's error and the pieces that torch's allocator cannot use.

    They add up: on an H100, GRPO of 4B with 80.1 GB planned and 4.0 GB in pieces ran out of 85 GB
    after four steps.
    """
    return entry.total_gb * (1 + entry.error) + entry.scattered_gb


def at_worst(entry: Memory) -> Memory:
    """Return the entry with the error of the worst published run if its GPU was never measured."""
    worst = WORST_PUBLISHED - 1 if entry.error >= Hardware.memory_error else 0.0
    return dataclasses.replace(entry, error=max(entry.error, worst))


def close(entry: Memory) -> bool:
    """Return whether the process fits according to plan, but may run out of memory."""
    return entry.fits and not fills_capacity(entry) and most_gb(entry) > entry.capacity_gb


def fits(config: Config, host: Host) -> bool:
    """Return whether every process fits according to plan."""
    return all(entry.fits for entry in on_host(config, host))


def fits_with_margin(config: Config, host: Host) -> bool:
    """Return whether every process fits even if the planner's error is added."""
    return all(entry.fits and not close(entry) for entry in on_host(config, host))


def why(entry: Memory) -> str:
    """Return why an entry that is close may run out of memory."""
    unused = (
        f" and {entry.scattered_gb:.1f} GB held unused by fragmentation"
        if entry.scattered_gb
        else ""
    )
    published = (
        f" (published runs took up to {WORST_PUBLISHED} times the plan)"
        if entry.error >= Hardware.memory_error
        else ""
    )
    reasons = f"with {entry.error:.0%} for the planner's error{published}{unused}"
    return f"{reasons}, it needs {most_gb(entry):.1f} GB (docs/memory.md)"


def tightness(entry: Memory) -> tuple[bool, bool, bool, float]:
    """Return a sort key that is greatest for the entry that exceeds its capacity the most.

    If all fit, it is greatest for the smallest margin. Servers, which fill their capacity, are
    smallest.
    """
    return not entry.fits, not fills_capacity(entry), close(entry), share(entry)


def warnings(config: Config, entries: list[Memory], sharding: str | None = None) -> list[str]:
    """Return a warning if the tightest process fits with too small a margin.

    `sharding` is an override that leaves a margin. launch/search/fit.py reports processes that do
    not fit.
    """
    entry = max(entries, key=tightness, default=None)
    if entry is None or not close(entry) or config.hardware.vendor == Vendor.none:
        return []
    usage = (
        f"{entry.process}: {entry.total_gb:.1f} of {entry.capacity_gb:.1f} GB, "
        f"{share(entry):.0%} of its GPU"
    )
    size, names = batch(config).per_device, [n for n in BATCHES if value_or_none(config, n)]
    length = next((name for name in LENGTHS if value_or_none(config, name)), None)
    if size > 1 and names:
        remedy = f"a smaller method.args.{names[0]} (now {size})"
    elif length is None:
        remedy = "a larger GPU, or more GPUs"
    else:
        remedy = f"a smaller method.args.{length} (now {value(config, length)}), or more GPUs"
    # Expandable segments avoid free pieces, but on AMD they can hang (pytorch#192259), and with
    # vLLM they have limits (launch/rules/warnings.py).
    is_supported = config.hardware.vendor == Vendor.nvidia and not generates_with_vllm(config)
    if entry.scattered_gb and is_supported:
        fits_without_pieces = entry.total_gb * (1 + entry.error) <= entry.capacity_gb
        setting = "user_env.PYTORCH_ALLOC_CONF=expandable_segments:True"
        remedy = f"{setting}, {'or' if fits_without_pieces else 'and'} {remedy}"
    if sharding:
        remedy = f"{sharding} (same results, but ranks exchange weights), or {remedy}"
    return [f"{usage}. It may run out of memory: {why(entry)}. Use: {remedy}."]


def uncounted(config: Config) -> list[str]:
    """Return warnings about settings that the planner ignores."""
    if config.method.measures_machine:  # plans of these methods have no memory and speed
        return []
    names = ("packing", "padding_free", "activation_offloading", "auto_find_batch_size")
    ignored = [f"method.args.{name}=true" for name in names if value_or_none(config, name)]
    optimizer = value_or_none(config, "optim")
    if optimizer not in (None, *OPTIMIZERS, *BITSANDBYTES_8_BIT, TORCHAO_8_BIT):
        ignored.append(f"method.args.optim={optimizer} (AdamW is assumed)")
    if "max_length" in known(config) and not value(config, "max_length"):
        ignored.append(f"method.args.max_length=null (rows of {UNCUT_TOKENS} tokens are assumed)")
    lines = [f"memory and speed are planned without {', '.join(ignored)}."] if ignored else []
    model = config.model
    if config.method.uses_model and not shapes.is_known(model):
        lines.append(
            f"model.architecture={model.architecture}: memory and speed are a generic estimate, "
            f"with an error of up to {GENERIC_ERROR:.0%}. Its layers are counted as llama's."
        )
    if model.num_experts and config.adapter.rank is not None and config.method.trains:
        lines.append(
            f"adapter={config.adapter.name}: trains only the attention of {model.name}. Its "
            "experts have no adapter and stay as they are."
        )
    if config.adapter.dora and config.method.trains:
        lines.append("speed is planned for plain LoRA. DoRA is slower, because it computes norms.")
    return lines
