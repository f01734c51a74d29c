"""Reject servers that leave no GPU or have no vLLM, and groups that divide no generation."""

from __future__ import annotations

from collections.abc import Iterator

from launch.estimate.batch_counts import batch, generation_batch
from launch.machine import placement
from launch.rules.refusal import Refusal
from launch.schema import Config
from launch.schema.trainer_args import argument, known, value


def lengths(config: Config) -> dict[str, int]:
    """Return the arguments that limit a sequence, and their tokens."""
    names = ("max_length", "max_completion_length", "max_new_tokens", "sequence")
    values = {name: value(config, name) for name in names if name in known(config)}
    return {name: int(n) for name, n in values.items() if isinstance(n, (int, float))}


def longest(config: Config) -> int:
    """Return the tokens of the longest sequence that an argument allows."""
    return max([*lengths(config).values(), 0])


def has_vllm(config: Config) -> bool:
    """Return whether ranks start their own vLLM to generate, in any part of method=raft."""
    args = config.method.args
    parts = (args, args.get("sample"), args.get("evaluate"))
    return any(isinstance(part, dict) and part.get("engine") == "vllm" for part in parts)


def has_split(config: Config) -> bool:
    """Return whether a remedy may name topology=split."""
    return config.method.generates and config.hardware.vllm


def several(config: Config) -> list[str]:
    """Return the method's topologies for several GPUs."""
    default = ["ddp", "fsdp", "zero2", "zero3", *(["split"] if has_split(config) else [])]
    return [name for name in config.method.topologies or default if name != "single"]


def server_faults(c: Config) -> Iterator[Refusal]:
    """Yield what needs vLLM without having it, and servers that take every GPU."""
    topology, gpus = c.topology, placement.num_gpus(c)
    if not c.hardware.vllm and (user := _user_of_vllm(c)):
        remedy = "topology=single or ddp, where transformers generates"
        if c.method.starts_vllm:
            remedy = "another hardware=, or smoke=true, which runs its code with vLLM on the CPU"
        elif topology.name not in ("split", "colocate"):
            remedy = "method.args.engine=transformers"
        yield Refusal("vllm", f"{user}: no released vLLM serves {c.hardware.gfx}", remedy)
    taken = placement.num_server_gpus(c)
    if topology.name == "split" and taken >= max(2, gpus):  # one server and trainer share a GPU
        message = (
            f"topology=split: servers take {taken} of {gpus} GPU(s), so none is left for training"
        )
        yield Refusal("split_needs_a_trainer", message, _smaller_servers(c))


def group_faults(c: Config) -> Iterator[Refusal]:
    """Yield a group size that TRL rejects, so that no search or split proposes one."""
    if (
        not c.method.generates
        or generation_batch(c) % (groups := int(value(c, "num_generations"))) == 0
    ):
        return
    total = generation_batch(c)
    divisor = max((n for n in range(2, groups + 1) if total % n == 0), default=total)
    message = (
        f"method.args.num_generations={groups} does not divide the {total} completions of a "
        f"generation on {batch(c).ranks} rank(s)"
    )
    remedy = f"method.args.num_generations={divisor}; or a batch of a multiple of {groups}"
    yield Refusal("groups_divide", message, remedy)


def _user_of_vllm(config: Config) -> str:
    """Return the setting that needs vLLM, unless smoke=true replaces it on a CPU; else ''."""
    if config.topology.name in ("split", "colocate") and config.method.generates:
        return f"topology={config.topology.name}"
    if config.smoke:
        return ""
    if argument(config, "engine") == "vllm":
        return "method.args.engine=vllm"
    starts_vllm = config.method.starts_vllm and not config.method.tunes
    return f"method={config.method.name}" if starts_vllm else ""


def _smaller_servers(config: Config) -> str:
    """Return remedies that leave a GPU to train on: fewer or narrower servers, or more GPUs."""
    topology, gpus = config.topology, placement.num_gpus(config)
    room = max(1, gpus - 1)  # on one GPU the server and its trainer share it
    widths = [n for n in range(1, room // topology.servers + 1) if config.model.num_heads % n == 0]
    needed = placement.num_server_gpus(config) + 1
    remedies = {
        f"topology.servers={room // topology.server_tensor_parallel}": (
            topology.server_tensor_parallel <= room
        ),
        f"topology.server_tensor_parallel={max(widths, default=0)}": bool(widths),
        f"topology.num_gpus={needed}": gpus < needed <= config.hardware.gpus_per_node,
    }
    possible = " or ".join(remedy for remedy, works in remedies.items() if works)
    return possible or "topology.servers=1 topology.server_tensor_parallel=1"
