"""Describe how close a plan is to its memory limit, and what the planner does not count.

A run that fits by less than the planner's own error may not fit.
"""

from __future__ import annotations

from launch.estimate.batch_counts import UNCUT_TOKENS, batch
from launch.estimate.memory import on_host
from launch.estimate.rank_memory import IN_8_BITS, OF_TORCHAO, OPTIMIZERS, generates_with_vllm
from launch.machine.detect import Host
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.plan import Memory
from launch.schema.trainer_args import argument, known, value

ERROR = 0.05  # nearly all runs of docs/results/memory.md were within this share of the plan
BATCHES = ("per_device_train_batch_size", "batch_size")  # for training, for inference
LENGTHS = ("max_length", "max_completion_length", "max_new_tokens")


def share(entry: Memory) -> float:
    return entry.total_gb / entry.capacity_gb if entry.capacity_gb else float("inf")


def takes_its_share(entry: Memory) -> bool:
    """Return whether the process fills its share whatever its size, as vLLM's cache does."""
    return "kv cache" in entry.parts_gb


def close(entry: Memory) -> bool:
    """Return whether it fits, but by less than the planner's error or the allocator's pieces."""
    return entry.fits and not takes_its_share(entry) and bool(_doubts(entry))


def has_room(config: Config, host: Host) -> bool:
    """Return whether every process fits with the planner's own error to spare."""
    return all(entry.fits and not close(entry) for entry in on_host(config, host))


def why(entry: Memory) -> str:
    """Explain why an entry that is close may not fit."""
    return f"{', and '.join(_doubts(entry).values())} (docs/memory.md)"


def _doubts(entry: Memory) -> dict[str, str]:
    """Return why an entry may not fit: it is `short` of room, or memory is in `pieces`."""
    doubts, scattered = {}, entry.scattered_gb
    if share(entry) > 1 - ERROR:
        doubts["short"] = f"less room than the planner's error of {ERROR:.0%}"
    if scattered > 0 and entry.total_gb + scattered > entry.capacity_gb:
        held = f"{scattered:.1f} GB more, free but in pieces"
        doubts["pieces"] = f"torch's allocator may hold {held}"
    return doubts


def tightness(entry: Memory) -> tuple[bool, bool, bool, float]:
    """Return a sort key. The greatest exceeds its memory most or, if all fit, has least room.

    Servers, which fill their share, come last.
    """
    return not entry.fits, not takes_its_share(entry), close(entry), share(entry)


def warnings(config: Config, entries: list[Memory]) -> list[str]:
    """Warn about each process that fits with too little room to be sure.

    launch/search/fit.py reports a process that does not fit.
    """
    entry = max(entries, key=tightness, default=None)
    if entry is None or not close(entry) or config.hardware.vendor == Vendor.none:
        return []
    needs = (
        f"{entry.process}: {entry.total_gb:.1f} of {entry.capacity_gb:.1f} GB, "
        f"{share(entry):.0%} of its GPU"
    )
    size, names = batch(config).per_device, [name for name in BATCHES if argument(config, name)]
    longest = next((name for name in LENGTHS if argument(config, name)), None)
    if size > 1 and names:
        less = f"a smaller method.args.{names[0]} (now {size})"
    elif longest is None:
        less = "a larger GPU, or more of them"
    else:
        now = argument(config, longest)
        less = f"a smaller method.args.{longest} (now {now}), or more GPUs"
    # Pages avoid free pieces. On AMD they can hang (pytorch#192259); with vLLM they have limits
    # (launch/rules/warnings.py).
    doubts, pages = _doubts(entry), "user_env.PYTORCH_ALLOC_CONF=expandable_segments:True"
    has_pages = config.hardware.vendor == Vendor.nvidia and not generates_with_vllm(config)
    if "pieces" in doubts and has_pages:
        less = f"{pages}, {'and' if 'short' in doubts else 'or'} {less}"
    return [f"{needs}: {why(entry)}. It may not fit. Use: {less}."]


def uncounted(config: Config) -> list[str]:
    """Return a line for each argument in use that the planner does not count."""
    if config.method.measures_machine:  # nothing is planned for these methods
        return []
    names = ("packing", "padding_free", "activation_offloading", "auto_find_batch_size")
    left_out = [f"method.args.{name}=true" for name in names if argument(config, name)]
    optimizer = argument(config, "optim")
    if optimizer not in (None, *OPTIMIZERS, *IN_8_BITS, OF_TORCHAO):
        left_out.append(f"method.args.optim={optimizer} (AdamW is assumed)")
    if "max_length" in known(config) and not value(config, "max_length"):
        left_out.append(f"method.args.max_length=null (rows of {UNCUT_TOKENS} tokens are assumed)")
    lines = [f"memory and speed are planned without {', '.join(left_out)}."] if left_out else []
    if config.adapter.dora and config.method.trains:
        lines.append(
            "speed is planned as plain LoRA's: DoRA's norms, which make a step slower, are not "
            "counted."
        )
    return lines
