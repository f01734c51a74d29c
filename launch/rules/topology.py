"""Reject servers that take every GPU, vLLM on GPUs without it, and group sizes that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from containers import images
from launch.estimate.batch_counts import batch, generation_batch
from launch.machine import placement
from launch.rules.refusal import Refusal
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.trainer_args import known, value, value_or_none


def lengths(config: Config) -> dict[str, int]:
    """Return the arguments that limit a sequence's length, and their values in tokens."""
    names = ("max_length", "max_completion_length", "max_new_tokens", "sequence")
    values = {name: value(config, name) for name in names if name in known(config)}
    return {name: int(n) for name, n in values.items() if isinstance(n, (int, float))}


def longest(config: Config) -> int:
    """Return the tokens of the longest sequence that an argument allows."""
    return max([*lengths(config).values(), 0])


def has_vllm(config: Config) -> bool:
    """Return whether ranks start vLLM themselves to generate, in a phase of method=raft too."""
    args = config.method.args
    arguments = (args, args.get("sample"), args.get("evaluate"))
    return any(isinstance(part, dict) and part.get("engine") == "vllm" for part in arguments)


def has_split(config: Config) -> bool:
    """Return whether a remedy may suggest topology=split."""
    return config.method.generates and config.hardware.vllm


def multi_gpu_topologies(config: Config) -> list[str]:
    """Return the method's topologies for several GPUs."""
    default = ["ddp", "fsdp", "zero2", "zero3", *(["split"] if has_split(config) else [])]
    return [name for name in config.method.topologies or default if name != "single"]


def server_problems(c: Config) -> Iterator[Refusal]:
    """Reject settings that need vLLM on GPUs without it, and servers that take every GPU."""
    topology, gpus = c.topology, placement.num_gpus(c)
    image = images.load().get(c.container.name)
    problem = "" if c.hardware.vllm else f"no released vLLM supports {c.hardware.gfx}"
    if problem and c.hardware.vendor == Vendor.none:
        problem = "only smoke=true uses vLLM's build for the CPU"
    other = "another hardware=, or smoke=true, which runs the same code with vLLM on the CPU"
    if not problem and image and image.vllm == images.NONE and not c.smoke:
        problem = f"container={image.name} has no vLLM"
        other = f"container={c.hardware.container}"
    if problem and (setting := _setting_that_needs_vllm(c)):
        remedy = "topology=single or ddp, where transformers generates"
        remedy += ", or smoke=true" * (c.hardware.vendor == Vendor.none)
        if c.method.starts_vllm:
            remedy = other
        elif topology.name not in ("split", "colocate"):
            remedy = "method.args.engine=transformers"
        yield Refusal("vllm", f"{setting}: {problem}", remedy)
    serving = placement.num_server_gpus(c)
    # On one GPU, a server and its trainer share it.
    if topology.name == "split" and serving >= max(2, gpus + placement.serves_apart(c)):
        message = (
            f"topology=split: servers use {serving} of {gpus} GPU(s), and none is left to train"
        )
        yield Refusal("split_needs_a_trainer", message, _remedies(c))


def group_problems(c: Config) -> Iterator[Refusal]:
    """Reject a group size that TRL would reject, so that no search or split proposes it."""
    if not c.method.generates:
        return
    groups, total = int(value(c, "num_generations")), generation_batch(c)
    if total % groups == 0:
        return
    divisor = max((n for n in range(2, groups + 1) if total % n == 0), default=total)
    message = (
        f"method.args.num_generations={groups}: it does not divide the {total} completions of a "
        f"generation on {batch(c).ranks} rank(s)"
    )
    remedy = f"method.args.num_generations={divisor}; or a batch that is a multiple of {groups}"
    yield Refusal("groups_divide", message, remedy)


def _setting_that_needs_vllm(config: Config) -> str:
    """Return the setting that needs vLLM; '' if there is none or if smoke=true replaces vLLM."""
    if config.topology.name in ("split", "colocate") and config.method.generates:
        return f"topology={config.topology.name}"
    if config.smoke:
        return ""
    if value_or_none(config, "engine") == "vllm":
        return "method.args.engine=vllm"
    starts_vllm = config.method.starts_vllm and not config.method.tunes
    return f"method={config.method.name}" if starts_vllm else ""


def _remedies(config: Config) -> str:
    """Return overrides that leave a GPU for training: fewer or smaller servers, or more GPUs."""
    topology, gpus = config.topology, placement.num_gpus(config)
    spare = max(1, gpus - 1)  # on one GPU, a server and its trainer share it
    widths = [n for n in range(1, spare // topology.servers + 1) if config.model.num_heads % n == 0]
    needed = placement.num_server_gpus(config) + 1
    remedies = {
        f"topology.servers={spare // topology.server_tensor_parallel}": (
            topology.server_tensor_parallel <= spare
        ),
        f"topology.server_tensor_parallel={max(widths, default=0)}": bool(widths),
        f"topology.num_gpus={needed}": gpus < needed <= config.hardware.gpus_per_node,
    }
    possible = " or ".join(remedy for remedy, works in remedies.items() if works)
    return possible or "topology.servers=1 topology.server_tensor_parallel=1"
