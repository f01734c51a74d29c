"""Reject numbers of GPUs and servers that a topology or a method cannot use."""

from __future__ import annotations

from collections.abc import Iterator

from launch.estimate.batch_counts import least_staleness
from launch.estimate.memory import longest_served_gb
from launch.machine import placement
from launch.rules.refusal import Refusal, outside
from launch.schema import TOPOLOGIES, Config
from launch.schema.checked import Range
from launch.schema.enums import Vendor
from launch.schema.trainer_args import argument, known, value


def longest(config: Config) -> int:
    """Return the tokens of the longest sequence that an argument allows."""
    names = ("max_length", "max_completion_length", "max_new_tokens", "sequence")
    lengths = [value(config, name) for name in names if name in known(config)]
    return max(int(length) for length in [*lengths, 0] if isinstance(length, (int, float)))


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


def topology_faults(c: Config) -> Iterator[Refusal]:
    name, gpus, method = c.topology.name, placement.num_gpus(c), f"method={c.method.name}"
    # a trainer that generates nothing has fewer
    serves = c.method.generates or not c.method.trains
    default = [name for name in TOPOLOGIES if serves or name not in ("split", "colocate")]
    topologies = c.method.topologies or default
    if name not in topologies:
        remedy = " or ".join(f"topology={other}" for other in topologies)
        message = f"topology={name}: {method} does not run under it"
        yield Refusal("topology_of_method", message, remedy)
    if name == "single" and (c.topology.num_gpus or 1) > 1:
        message = f"topology=single with topology.num_gpus={gpus}: it runs on one GPU"
        remedy = f"topology={' or '.join(several(c))}"
        yield Refusal("single_is_one", message, remedy if several(c) else "topology.num_gpus=1")
    if not c.hardware.vllm and (user := _user_of_vllm(c)):
        remedy = "topology=single or ddp, where transformers generates"
        if c.method.starts_vllm:
            remedy = "another hardware=, or smoke=true, which runs its code with vLLM on the CPU"
        elif name not in ("split", "colocate"):
            remedy = "method.args.engine=transformers"
        yield Refusal("vllm", f"{user}: no released vLLM serves {c.hardware.gfx}", remedy)
    strategies: tuple[str, ...] = ("ddp", "fsdp", "zero2", "zero3")
    if name not in ("split", "colocate"):
        strategies = ("none",) if name == "single" else (name,)
    elif name == "colocate" and gpus == 1:
        strategies = ("none",)
    if c.topology.strategy not in strategies:
        message = f"topology.strategy={c.topology.strategy} under topology={name}"
        why = f"{gpus} GPU(s) need another"
        remedy = " or ".join(f"topology.strategy={s}" for s in strategies)
        yield Refusal("strategy_of_topology", f"{message}: {why}", remedy)
    if c.hardware.vendor != Vendor.none:
        yield from outside(
            "num_gpus",
            "topology.num_gpus",
            c.topology.num_gpus,
            Range(least=1, most=c.hardware.gpus_per_node),
            "a node has fewer GPUs",
            "hardware.gpus_per_node= for a larger node",
        )


def server_faults(c: Config) -> Iterator[Refusal]:
    """Yield what is wrong with the servers of topology=split."""
    topology, is_split = c.topology, c.topology.name == "split"
    if is_split or has_vllm(c):
        yield from outside(
            "server_cache",
            "topology.server_cache_gb",
            topology.server_cache_gb,
            Range(least=longest_served_gb(c)),
            "one sequence takes more",
            "a smaller topology.server_max_length",
        )
    if not is_split:
        return
    gpus, taken = placement.num_gpus(c), placement.num_server_gpus(c)
    if taken >= max(2, gpus):  # one server and one trainer share a GPU
        message = (
            f"topology=split: servers take {taken} of {gpus} GPU(s), so none is left for training"
        )
        yield Refusal("split_needs_a_trainer", message, _smaller_servers(c))
    yield from outside(
        "split_needs_a_server",
        "topology.servers",
        topology.servers,
        Range(least=1),
        "topology=split generates with a server",
    )
    yield from outside(
        "server_length",
        "topology.server_max_length",
        topology.server_max_length,
        Range(least=longest(c) + 1, most=c.model.max_positions),
        "no room for a prompt and its completion, or more than the model's positions",
    )
    if topology.overlap == "stream" and "num_generations" in known(c):
        yield from outside(
            "staleness_of_stream",
            "topology.max_staleness",
            topology.max_staleness,
            Range(least=least_staleness(c)),
            "completions are always older than this",
            "topology.overlap=false",
        )


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
