"""Rules about topologies: how many GPUs, who trains and who generates, and keys that another topology would ignore."""

from __future__ import annotations

from launch import topology
from launch.batch import least_staleness
from launch.planner.memory import longest_served_gb
from launch.rules.rule import Rule
from launch.schema import Config, Fsdp, Topology
from launch.schema.enums import Vendor
from launch.supervision.serving import shares_gpu
from launch.trainer_args import argument, known, value

MOST_PROCESSES = 1024  # without GPUs: more than a machine has cores


def longest(config: Config) -> int:
    """Tokens of the longest sequence an argument asks for."""
    names = ("max_length", "max_completion_length", "max_new_tokens", "sequence")
    asked = [value(config, name) for name in names if name in known(config)]
    return max(int(a) for a in [*asked, 0] if isinstance(a, (int, float)))


def _strategies(config: Config) -> tuple[str, ...]:
    """Of the trainers, under this topology."""
    several = ("ddp", "fsdp", "zero2", "zero3")
    if config.topology.name == "colocate":
        return ("none",) if topology.num_gpus(config) == 1 else several
    return {"single": ("none",), "split": several}.get(config.topology.name, (config.topology.name,))


def _server_keys(config: Config) -> list[str]:
    """Keys of a generation server that were given a value of their own; a vLLM without a server reads its share of the memory."""
    args = config.method.args
    parts = [args, *(args.get(part) for part in ("sample", "evaluate"))]  # method=raft's, for these phases
    vllm = any(isinstance(part, dict) and part.get("engine") == "vllm" for part in parts)
    unread = ["overlap", "max_staleness", "server_max_length", *([] if vllm else ["server_cache_gb", "server_memory_share"])]
    unread += [] if vllm or config.topology.name == "colocate" else ["server_args"]
    return [key for key in unread if getattr(config.topology, key) != getattr(Topology(), key)]


def _is_read(config: Config, key: str) -> bool:
    """Whether anything reads this key of a server; where nothing does, it is enough to say so."""
    return config.topology.name == "split" or key not in _server_keys(config)


def _given_servers(config: Config) -> list[str]:
    """Keys of how many servers there are, and how wide each, that are not as without one."""
    return [key for key, without in (("servers", 0), ("server_tensor_parallel", 1)) if getattr(config.topology, key) != without]


def _has_split(config: Config) -> bool:
    """Whether a remedy may name the topology that has a server: the method generates while it trains, and vLLM serves this GPU."""
    return config.method.name == "grpo" and config.hardware.vllm


def _several(config: Config) -> list[str]:
    """Topologies of several GPUs that the method has."""
    return [
        name
        for name in config.method.topologies or ["ddp", "fsdp", "zero2", "zero3", *(["split"] if _has_split(config) else [])]
        if name != "single"
    ]


def _one_of(config: Config, names: list[str]) -> str:
    """Those topologies of `names` that the method has."""
    return " or ".join(f"topology={name}" for name in names if name in _several(config))


def _or_without(config: Config, names: list[str], key: str) -> str:
    """A remedy: one of the topologies that read `key`, where the method has one, or the key left out."""
    found = _one_of(config, names)
    return f"{found}, or no {key}" if found else f"no {key}"


def _sharding(config: Config, said: str) -> str:
    """`said` of the topologies that hold a part of the model on each GPU, where the method has one."""
    found = _one_of(config, ["fsdp", "zero3"])
    return said.format(found) if found else ""


def _smaller_servers(config: Config) -> str:
    """What leaves a GPU to train on, of a split that leaves none: fewer servers, narrower ones, or more GPUs."""
    given, gpus = config.topology, topology.num_gpus(config)
    room = max(1, gpus - 1)  # on one GPU the server and its trainer share it
    widths = [n for n in range(1, room // given.servers + 1) if config.model.num_heads % n == 0]
    found = [f"topology.servers={room // given.server_tensor_parallel}"] if given.server_tensor_parallel <= room else []
    found += [f"topology.server_tensor_parallel={max(widths)}"] if widths else []
    needed = topology.num_server_gpus(config) + 1
    found += [f"topology.num_gpus={needed}"] if gpus < needed <= config.hardware.gpus_per_node else []
    return " or ".join(found) or "topology.servers=1 topology.server_tensor_parallel=1"


def _colocate_arguments(config: Config) -> list[str]:
    names = ("gpu_memory_utilization", "max_model_length", "tensor_parallel_size", "enable_sleep_mode", "model_impl")
    return [f"vllm_{name}" for name in names if f"vllm_{name}" in config.method.args]


def _no_offload(config: Config) -> tuple[str, str, list[str]]:
    """The key of what would stay on the GPU, why, and the topologies that take it to the host's memory; no key where all goes there."""
    zero, strategy = config.topology.zero, config.topology.strategy
    if zero.offload_parameters and strategy != "zero3":
        why = "it needs zero3" + ("; ZeRO-2 keeps all parameters on every GPU" if strategy == "zero2" else ", and would be ignored")
        return "topology.zero.offload_parameters", why, ["zero3"]
    if zero.offload_optimizer and strategy not in ("zero2", "zero3"):
        return "topology.zero.offload_optimizer", "it needs ZeRO, and would be ignored", ["zero2", "zero3"]
    return "", "", []


TOPOLOGY_RULES = [
    Rule(
        "tensor_parallel",
        lambda c: c.topology.tensor_parallel != 1,
        lambda c: f"topology.tensor_parallel={c.topology.tensor_parallel}: tensor-parallel training is not offered",
        lambda c: (
            f"topology.tensor_parallel=1{_sharding(c, '; {} shards a model over GPUs')}"
            + ("; topology.server_tensor_parallel=N spreads a generation server" if _has_split(c) else "")
        ),
    ),
    Rule(
        "pipeline_parallel",
        lambda c: c.topology.pipeline_parallel != 1,
        lambda c: f"topology.pipeline_parallel={c.topology.pipeline_parallel}: pipeline-parallel training is not offered",
        lambda c: f"topology.pipeline_parallel=1{_sharding(c, '; {} holds a model that one GPU cannot')}",
    ),
    Rule(
        "num_gpus",
        lambda c: c.hardware.vendor != Vendor.none and not 1 <= topology.num_gpus(c) <= c.hardware.gpus_per_node,
        lambda c: f"topology.num_gpus={topology.num_gpus(c)}: a {c.hardware.name} node has {c.hardware.gpus_per_node}",
        lambda c: f"1 to {c.hardware.gpus_per_node}, or hardware.gpus_per_node= for a larger node",
    ),
    Rule(
        "num_processes",
        lambda c: c.hardware.vendor == Vendor.none and topology.num_gpus(c) > MOST_PROCESSES,
        lambda c: f"topology.num_gpus={topology.num_gpus(c)}: without GPUs they are processes of one machine",
        lambda c: f"1 to {MOST_PROCESSES}",
    ),
    Rule(
        "single_is_one",
        lambda c: c.topology.name == "single" and topology.num_gpus(c) > 1,
        lambda c: f"topology=single with topology.num_gpus={topology.num_gpus(c)}",
        lambda c: f"topology={' or '.join(_several(c))}" if _several(c) else f"topology.num_gpus=1: method={c.method.name} runs on one",
    ),
    Rule(
        "topology_of_method",
        lambda c: bool(c.method.topologies) and c.topology.name not in c.method.topologies,
        lambda c: (
            f"topology={c.topology.name} with method={c.method.name}: it runs "
            + ("in one process" if c.method.topologies == ["single"] else f"under {', '.join(c.method.topologies)}")
        ),
        lambda c: " or ".join(f"topology={name}" for name in c.method.topologies),
    ),
    Rule(
        "several_ranks",
        lambda c: (
            c.method.topologies == ["ddp"] == [c.topology.name]
            and topology.num_trainers(c) == 1
            and not (c.smoke and c.topology.num_gpus is None)  # two processes then
        ),
        lambda c: f"method={c.method.name} on one rank: it measures what passes between several",
        lambda c: "topology.num_gpus=2 or more; or smoke=true, which runs its code in two processes on a CPU",
    ),
    Rule(
        "split_is_for_grpo",
        lambda c: c.topology.name in ("split", "colocate") and c.method.name != "grpo" and c.method.kind == "trainer",
        lambda c: f"topology={c.topology.name} with method={c.method.name}: only grpo generates while it trains",
        lambda c: "topology=ddp or fsdp",
    ),
    Rule(
        "split_needs_vllm",
        lambda c: c.topology.name in ("split", "colocate") and c.method.name == "grpo" and not c.hardware.vllm,
        lambda c: f"topology={c.topology.name} on {c.hardware.name}: no released vLLM serves {c.hardware.gfx}",
        lambda c: "topology=single or ddp, where transformers generates",
    ),
    Rule(
        "bench_needs_vllm",
        lambda c: c.method.name == "bench/vllm" and not c.hardware.vllm and not c.smoke,
        lambda c: f"method=bench/vllm on {c.hardware.name}: no released vLLM serves {c.hardware.gfx}",
        lambda c: "another hardware; or smoke=true, which runs its code with vLLM's build for the CPU",
    ),
    Rule(
        "split_needs_a_trainer",
        lambda c: c.topology.name == "split" and topology.num_server_gpus(c) >= max(2, topology.num_gpus(c)),  # one of each shares a GPU
        lambda c: (
            f"topology=split on {topology.num_gpus(c)} GPU(s): the server takes {topology.num_server_gpus(c)}, none is left to train on"
        ),
        _smaller_servers,
    ),
    Rule(
        "split_needs_a_server",
        lambda c: c.topology.name == "split" and (c.topology.servers < 1 or c.topology.server_tensor_parallel < 1),
        lambda c: f"topology.servers={c.topology.servers}, topology.server_tensor_parallel={c.topology.server_tensor_parallel}",
        lambda c: "both are at least 1 under topology=split",
    ),
    Rule(
        "servers_without_split",
        lambda c: c.topology.name != "split" and bool(_given_servers(c)),
        lambda c: (
            f"topology.{(key := _given_servers(c)[0])}={getattr(c.topology, key)} under topology={c.topology.name}: nothing would be served"
        ),
        lambda c: _or_without(c, ["split"], f"topology.{_given_servers(c)[0]}"),
    ),
    Rule(
        "server_keys",
        lambda c: c.topology.name != "split" and bool(_server_keys(c)),
        lambda c: f"topology.{_server_keys(c)[0]} under topology={c.topology.name}: it has no server",
        lambda c: _or_without(c, ["split"], f"topology.{_server_keys(c)[0]}"),
    ),
    Rule(
        "colocate_arguments",
        lambda c: c.topology.name != "colocate" and bool(_colocate_arguments(c)),
        lambda c: f"method.args.{_colocate_arguments(c)[0]} under topology={c.topology.name}: only topology=colocate reads it",
        lambda c: (
            "topology.server_memory_share, server_max_length and server_tensor_parallel for a server; or topology=colocate"
            if _has_split(c)
            else f"no method.args.{_colocate_arguments(c)[0]}"
        ),
    ),
    Rule(
        "overlap_without_correction",
        lambda c: c.topology.overlap and _is_read(c, "overlap") and argument(c, "vllm_importance_sampling_correction") is False,
        lambda c: "topology.overlap without vllm_importance_sampling_correction: completions of older weights would count as new",
        lambda c: "method.args.vllm_importance_sampling_correction=true, TRL's default",
    ),
    Rule(
        "staleness_without_stream",
        lambda c: c.topology.max_staleness is not None and c.topology.name == "split" and c.topology.overlap != "stream",
        lambda c: f"topology.max_staleness={c.topology.max_staleness} without topology.overlap=stream: nothing reads it",
        lambda c: "topology.overlap=stream, or no topology.max_staleness",
    ),
    Rule(
        "staleness_of_stream",
        lambda c: (
            c.topology.overlap == "stream"
            and "num_generations" in known(c)
            and c.topology.max_staleness is not None
            and c.topology.max_staleness < least_staleness(c)
            and _is_read(c, "max_staleness")
        ),
        lambda c: (
            f"topology.max_staleness={c.topology.max_staleness} with topology.overlap=stream: completions of the next generation are "
            f"{least_staleness(c)} step(s) old when it is trained on"
        ),
        lambda c: "topology.overlap=false" if c.topology.max_staleness == 0 else f"topology.max_staleness={least_staleness(c)} or more",
    ),
    Rule(
        "overlap_on_one_gpu",
        lambda c: c.topology.overlap and shares_gpu(c),
        lambda c: "topology.overlap on one GPU: generation and training take turns there, and completions would be of older weights",
        lambda c: "topology.overlap=false, or topology.num_gpus=2",
    ),
    Rule(
        "server_heads",
        lambda c: c.topology.name == "split" and c.model.num_heads % c.topology.server_tensor_parallel != 0,
        lambda c: f"topology.server_tensor_parallel={c.topology.server_tensor_parallel}: {c.model.name} has {c.model.num_heads} heads",
        lambda c: "a number that divides them",
    ),
    Rule(
        "server_memory",
        lambda c: c.topology.server_memory_share > 1 and _is_read(c, "server_memory_share"),
        lambda c: f"topology.server_memory_share={c.topology.server_memory_share:g}: it is a share of one GPU's memory",
        lambda c: "a number above 0 and up to 1; vLLM's own is 0.9",
    ),
    Rule(
        "server_cache",
        lambda c: 0 < (c.topology.server_cache_gb or 0) < longest_served_gb(c) and _is_read(c, "server_cache_gb"),
        lambda c: (
            f"topology.server_cache_gb={c.topology.server_cache_gb:g}: one sequence as long as it serves takes {longest_served_gb(c):.3g} "
            "GB, and vLLM does not start with less"
        ),
        lambda c: "more of it" + (", or a smaller topology.server_max_length" if c.topology.name == "split" else ""),
    ),
    Rule(
        "server_length",
        lambda c: (
            c.topology.server_max_length is not None
            and not longest(c) < c.topology.server_max_length <= c.model.max_positions
            and _is_read(c, "server_max_length")
        ),
        lambda c: (
            f"topology.server_max_length={c.topology.server_max_length}: a completion has {longest(c)} tokens and needs its prompt, "
            f"and {c.model.name} has {c.model.max_positions} positions"
        ),
        lambda c: f"more than {longest(c)} and at most {c.model.max_positions}",
    ),
    Rule(
        "numa_binding",
        lambda c: c.topology.numa_binding is not None and c.hardware.vendor == Vendor.none,
        lambda c: "topology.numa_binding on a CPU: ranks are bound to the cores next to their GPUs",
        lambda c: "topology.numa_binding=null",
    ),
    Rule(
        "offload_without_zero",
        lambda c: bool(_no_offload(c)[0]),
        lambda c: f"{_no_offload(c)[0]}=true under topology={c.topology.name}: {_no_offload(c)[1]}",
        lambda c: _or_without(c, _no_offload(c)[2], _no_offload(c)[0]),
    ),
    Rule(
        "fsdp_options_without_fsdp",
        lambda c: c.topology.strategy != "fsdp" and c.topology.fsdp != Fsdp(),
        lambda c: f"topology.fsdp.* under topology={c.topology.name}: it would be ignored",
        lambda c: _one_of(c, ["fsdp"]) or "no topology.fsdp.*",
    ),
    Rule(
        "two_checkpointings",
        lambda c: c.topology.fsdp.activation_checkpointing and bool(argument(c, "gradient_checkpointing")),
        lambda c: "topology.fsdp.activation_checkpointing=true with method.args.gradient_checkpointing=true: transformers refuses both",
        lambda c: "method.args.gradient_checkpointing=false",
    ),
    Rule(
        "strategy_of_topology",
        lambda c: c.topology.strategy not in _strategies(c),
        lambda c: (
            f"topology.num_gpus={topology.num_gpus(c)} under topology={c.topology.name}: several GPUs need a strategy"
            if c.topology.name == "colocate" and c.topology.strategy == "none"
            else f"topology.strategy={c.topology.strategy} under topology={c.topology.name}: one contradicts the other"
        ),
        lambda c: " or ".join(f"topology.strategy={s}" for s in _strategies(c)),
    ),
]
