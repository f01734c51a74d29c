"""Define rules about topologies: numbers of GPUs, and servers."""

from __future__ import annotations

from launch.machine import placement
from launch.rules.rule import Rule
from launch.schema import TOPOLOGIES, Config
from launch.schema.trainer_args import argument, known, value


def longest(config: Config) -> int:
    """Return the tokens of the longest sequence that an argument allows."""
    names = ("max_length", "max_completion_length", "max_new_tokens", "sequence")
    asked = [value(config, name) for name in names if name in known(config)]
    return max(int(a) for a in [*asked, 0] if isinstance(a, (int, float)))


def _strategies(config: Config) -> tuple[str, ...]:
    """Return the strategies that trainers may have under this topology."""
    several = ("ddp", "fsdp", "zero2", "zero3")
    if config.topology.name == "colocate":
        return ("none",) if placement.num_gpus(config) == 1 else several
    return {"single": ("none",), "split": several}.get(
        config.topology.name, (config.topology.name,)
    )


def has_vllm(config: Config) -> bool:
    """Return whether ranks start their own vLLM to generate, in any part of method=raft."""
    args = config.method.args
    parts = (args, args.get("sample"), args.get("evaluate"))
    return any(isinstance(part, dict) and part.get("engine") == "vllm" for part in parts)


def is_split(config: Config) -> bool:
    return config.topology.name == "split"


def has_split(config: Config) -> bool:
    """Return whether a remedy may name topology=split."""
    return config.method.generates and config.hardware.vllm


def several(config: Config) -> list[str]:
    """Return the method's topologies for several GPUs."""
    return [
        name
        for name in config.method.topologies
        or ["ddp", "fsdp", "zero2", "zero3", *(["split"] if has_split(config) else [])]
        if name != "single"
    ]


def _topologies(config: Config) -> list[str]:
    """Return the topologies of a method, of which a trainer that generates nothing has fewer."""
    serves = config.method.generates or not config.method.trains
    default = [name for name in TOPOLOGIES if serves or name not in ("split", "colocate")]
    return config.method.topologies or default


def _needs_vllm(config: Config) -> str:
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
    given, gpus = config.topology, placement.num_gpus(config)
    room = max(1, gpus - 1)  # on one GPU the server and its trainer share it
    widths = [n for n in range(1, room // given.servers + 1) if config.model.num_heads % n == 0]
    found = (
        [f"topology.servers={room // given.server_tensor_parallel}"]
        if given.server_tensor_parallel <= room
        else []
    )
    found += [f"topology.server_tensor_parallel={max(widths)}"] if widths else []
    needed = placement.num_server_gpus(config) + 1
    found += (
        [f"topology.num_gpus={needed}"] if gpus < needed <= config.hardware.gpus_per_node else []
    )
    return " or ".join(found) or "topology.servers=1 topology.server_tensor_parallel=1"


TOPOLOGY_RULES = [
    Rule(
        "topology_of_method",
        lambda c: c.topology.name not in _topologies(c),
        lambda c: f"topology={c.topology.name}: method={c.method.name} does not run under it",
        lambda c: " or ".join(f"topology={name}" for name in _topologies(c)),
    ),
    Rule(
        "several_ranks",
        lambda c: (
            c.method.topologies == ["ddp"] == [c.topology.name]
            and placement.num_trainers(c) == 1
            and not (c.smoke and c.topology.num_gpus is None)  # this means two processes
        ),
        lambda c: f"method={c.method.name} needs two ranks: it measures what passes between them",
        "topology.num_gpus=2 or more; or smoke=true, which runs its code in two processes on a CPU",
    ),
    Rule(
        "vllm",
        lambda c: bool(_needs_vllm(c)) and not c.hardware.vllm,
        lambda c: f"{_needs_vllm(c)}: no released vLLM serves {c.hardware.gfx}",
        lambda c: (
            "another hardware; or smoke=true, which runs its code with vLLM's build for the CPU"
            if c.method.starts_vllm
            else "method.args.engine=transformers"
            if c.topology.name not in ("split", "colocate")
            else "topology=single or ddp, where transformers generates"
        ),
    ),
    Rule(
        "split_needs_a_trainer",
        lambda c: (
            c.topology.name == "split"
            and placement.num_server_gpus(c) >= max(2, placement.num_gpus(c))
        ),  # one server and one trainer share a GPU
        lambda c: (
            f"topology=split: servers take {placement.num_server_gpus(c)} of "
            f"{placement.num_gpus(c)} GPU(s), none is left to train on"
        ),
        _smaller_servers,
    ),
    Rule(
        "server_heads",
        lambda c: (
            c.topology.name == "split"
            and c.model.num_heads % c.topology.server_tensor_parallel != 0
        ),
        lambda c: f"topology.server_tensor_parallel: {c.model.name} has {c.model.num_heads} heads",
        "a number that divides them",
    ),
    Rule(
        "strategy_of_topology",
        lambda c: c.topology.strategy not in _strategies(c),
        lambda c: (
            f"topology.num_gpus={placement.num_gpus(c)} under topology={c.topology.name}: "
            "several GPUs need a strategy"
            if c.topology.name == "colocate" and c.topology.strategy == "none"
            else (
                f"topology.strategy={c.topology.strategy} under topology={c.topology.name}: one "
                "contradicts the other"
            )
        ),
        lambda c: " or ".join(f"topology.strategy={s}" for s in _strategies(c)),
    ),
]
