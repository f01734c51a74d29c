"""Define rules about topologies: numbers of GPUs, and servers."""

from __future__ import annotations

from launch.estimate.batch import least_staleness
from launch.estimate.memory import longest_served_gb
from launch.machine import placement
from launch.machine.placement import shares_gpu
from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Vendor
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
        "model_parallel",
        lambda c: (c.topology.tensor_parallel, c.topology.pipeline_parallel) != (1, 1),
        "tensor- and pipeline-parallel training is not offered",
        lambda c: (
            "topology.tensor_parallel=1 topology.pipeline_parallel=1"
            + "; topology=fsdp holds a model that one GPU cannot" * ("fsdp" in several(c))
        ),
    ),
    Rule(
        "num_gpus",
        lambda c: (
            c.hardware.vendor != Vendor.none
            and not 1 <= placement.num_gpus(c) <= c.hardware.gpus_per_node
        ),
        lambda c: (
            f"topology.num_gpus={placement.num_gpus(c)}: a {c.hardware.name} node has "
            f"{c.hardware.gpus_per_node}"
        ),
        lambda c: f"1 to {c.hardware.gpus_per_node}, or hardware.gpus_per_node= for a larger node",
    ),
    Rule(
        "single_is_one",
        lambda c: c.topology.name == "single" and placement.num_gpus(c) > 1,
        lambda c: f"topology=single with topology.num_gpus={placement.num_gpus(c)}",
        lambda c: (
            f"topology={' or '.join(several(c))}"
            if several(c)
            else f"topology.num_gpus=1: method={c.method.name} runs on one"
        ),
    ),
    Rule(
        "topology_of_method",
        lambda c: bool(c.method.topologies) and c.topology.name not in c.method.topologies,
        lambda c: f"topology={c.topology.name}: method={c.method.name} does not run under it",
        lambda c: " or ".join(f"topology={name}" for name in c.method.topologies),
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
        "split_is_for_grpo",
        lambda c: (
            c.topology.name in ("split", "colocate") and not c.method.generates and c.method.trains
        ),
        lambda c: f"topology={c.topology.name}: method={c.method.name} generates nothing",
        "topology=ddp or fsdp",
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
        "split_needs_a_server",
        lambda c: (
            c.topology.name == "split"
            and (c.topology.servers < 1 or c.topology.server_tensor_parallel < 1)
        ),
        "topology.servers or topology.server_tensor_parallel is 0",
        "both are at least 1 under topology=split",
    ),
    Rule(
        "overlap_without_correction",
        lambda c: (
            c.topology.overlap
            and c.topology.name == "split"
            and argument(c, "vllm_importance_sampling_correction") is False
        ),
        "topology.overlap needs vllm_importance_sampling_correction for older weights",
        "method.args.vllm_importance_sampling_correction=true, TRL's default",
    ),
    Rule(
        "staleness_of_stream",
        lambda c: (
            c.topology.overlap == "stream"
            and "num_generations" in known(c)
            and c.topology.max_staleness is not None
            and c.topology.max_staleness < least_staleness(c)
            and c.topology.name == "split"
        ),
        lambda c: f"topology.max_staleness: completions are {least_staleness(c)} step(s) old",
        lambda c: (
            "topology.overlap=false"
            if c.topology.max_staleness == 0
            else f"topology.max_staleness={least_staleness(c)} or more"
        ),
    ),
    Rule(
        "overlap_on_one_gpu",
        lambda c: c.topology.overlap and shares_gpu(c),
        "topology.overlap on one GPU: generation and training take turns there",
        "topology.overlap=false, or topology.num_gpus=2",
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
        "server_cache",
        lambda c: (
            (is_split(c) or has_vllm(c))
            and 0 < (c.topology.server_cache_gb or 0) < longest_served_gb(c)
        ),
        lambda c: f"topology.server_cache_gb: one sequence takes {longest_served_gb(c):.3g} GB",
        lambda c: (
            "more of it"
            + (", or a smaller topology.server_max_length" if c.topology.name == "split" else "")
        ),
    ),
    Rule(
        "server_length",
        lambda c: (
            c.topology.server_max_length is not None
            and not longest(c) < c.topology.server_max_length <= c.model.max_positions
            and c.topology.name == "split"
        ),
        "topology.server_max_length has no room for a prompt and its completion, or is too long",
        lambda c: f"more than {longest(c)} and at most {c.model.max_positions}",
    ),
    Rule(
        "two_checkpointings",
        lambda c: (
            c.topology.fsdp.activation_checkpointing and bool(argument(c, "gradient_checkpointing"))
        ),
        "topology.fsdp.activation_checkpointing=true with "
        "method.args.gradient_checkpointing=true: transformers refuses both",
        "method.args.gradient_checkpointing=false",
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
