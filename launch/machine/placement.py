"""Place the process groups of a run on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from launch.core.errors import HostError
from launch.machine import masks
from launch.machine.detect import Host
from launch.schema import Config
from launch.schema.enums import Profile, Vendor

MASK = {Vendor.amd: "HIP_VISIBLE_DEVICES", Vendor.nvidia: "CUDA_VISIBLE_DEVICES"}
DTYPES = {"fp32": "float32", "fp16": "float16"}


def num_gpus(config: Config) -> int:
    """Return the number of GPUs that the run uses per node; on a CPU, the number of processes."""
    if config.topology.num_gpus is not None:
        return config.topology.num_gpus
    return 1 if config.topology.name in ("single", "colocate") else config.hardware.gpus_per_node


def num_server_gpus(config: Config) -> int:
    return config.topology.servers * config.topology.server_tensor_parallel


def num_trainers(config: Config) -> int:
    """Return the number of ranks that train, on all nodes."""
    return trainers_of_a_node(config) * config.runtime.slurm.nodes


def trainers_of_a_node(config: Config) -> int:
    return max(1, num_gpus(config) - num_server_gpus(config))


def starts_directly(config: Config, kind: str) -> bool:
    """Return whether a rank of this kind runs without torchrun.

    torchrun imports torch, which adds three seconds to every start. Several ranks, a strategy and
    profilers need it; profilers name their files by its RANK.
    """
    if kind == "prepare":
        return True
    alone = num_trainers(config) == 1 and config.topology.strategy == "none"
    profiled = config.profile == Profile.rocprof
    return alone and not profiled and kind in ("trainer", "evaluator", "exporter")


def creates_model(config: Config) -> bool:
    """Return whether vLLM needs a model that must be created first: random weights."""
    generates = config.topology.servers > 0 or config.topology.name == "colocate"
    return generates and config.model.path is None and config.model.init.name == "random"


def is_tokens_only(config: Config) -> bool:
    """Return whether GRPO's engine skips text because it exchanges only token ids.

    Text would cost more than half of the server's time. But `stop` and `bad_words` are text, and
    vLLM silently drops them without a tokenizer.
    """
    names = ("generation_kwargs", "vllm_structured_outputs_regex")
    return not any(config.method.args.get(name) for name in names)


@dataclass(frozen=True)
class ProcessGroup:
    """Processes of one kind on the GPUs of one node."""

    name: str
    kind: str  # a kind of schema.plan.Process
    gpus: list[int]
    num_ranks: int = 1
    node: int = 0


def process_groups(config: Config, host: Host) -> list[ProcessGroup]:
    """Return the groups of a run in the order they start."""
    gpus = visible_gpus(config, host, num_gpus(config)) if not config.method.exports else []
    serving, training = gpus[: num_server_gpus(config)], gpus[num_server_gpus(config) :]
    if shares_gpu(config):
        training = gpus
    groups = [ProcessGroup("prepare", "prepare", training[:1])] if creates_model(config) else []
    if config.topology.servers:
        groups.append(ProcessGroup("server", "server", serving, num_server_gpus(config)))
    kind, ranks = config.method.kind, trainers_of_a_node(config)
    name = "trainers" if kind == "trainer" else kind
    # The first node comes last because the launcher stops its own ranks first, and a signal to one
    # of them stops all.
    for node in [*range(1, config.runtime.slurm.nodes), 0]:
        groups.append(ProcessGroup(f"{name}-{node}" if node else name, kind, training, ranks, node))
    return groups


def visible_gpus(config: Config, host: Host, count: int) -> list[int]:
    """Return GPU indices for this run: the first `count` of the user's mask or of the host.

    Raises HostError.
    """
    return chosen_gpus(config, host, count) if config.hardware.vendor in MASK else []


def chosen_gpus(config: Config, host: Host, count: int) -> list[int]:
    """Return the same indices even if smoke=true has replaced the GPU by the CPU."""
    is_amd = config.hardware.gfx.startswith("gfx")
    if is_amd and masks.ROCR in host.environ:
        raise HostError(
            "ROCR_VISIBLE_DEVICES is set: with HIP_VISIBLE_DEVICES too, ROCm miscounts GPUs "
            "(pytorch/pytorch#140398) and RCCL's weight transfer fails. "
            "Unset it and choose GPUs by HIP_VISIBLE_DEVICES."
        )
    variables = masks.in_force(masks.AMD if is_amd else masks.NVIDIA, host.environ)
    if not variables:
        return list(range(count))
    (name, mask), *others = variables.items()
    visible = [int(part) for part in mask.split(",") if part.strip().isdigit()]
    fault = None
    if differing := [other for other, other_mask in others if other_mask != mask]:
        other = differing[0]
        fault = f"{other}={variables[other]} differs from it. Keep one: unset {other}."
    elif len(visible) < len(mask.split(",")):
        fault = f"indices are needed here, for example {name}=0,1."
    elif len(set(visible)) < len(visible):
        fault = "a GPU is named twice."
    elif len(visible) < count:
        fault = f"{len(visible)} GPUs, but this topology needs {count}. Widen the mask or set "
        fault += f"topology.num_gpus={len(visible)}."
    if fault:
        raise HostError(f"{name}={mask}: {fault}")
    return visible[:count]


def dtype(config: Config) -> str:
    """Return vLLM's name of the compute dtype."""
    return DTYPES.get(config.precision.compute, "bfloat16")


def shares_gpu(config: Config) -> bool:
    """Return whether the server and its one trainer share a GPU."""
    gpus = config.topology.num_gpus or config.hardware.gpus_per_node
    return config.topology.servers > 0 and gpus == 1 and config.hardware.vendor != Vendor.none


def backend(config: Config) -> str:
    """Return nccl (which means RCCL on AMD), or gloo for CPUs and for two ranks on one GPU."""
    return "gloo" if config.hardware.vendor == Vendor.none or shares_gpu(config) else "nccl"


def needs_sandbox(config: Config) -> bool:
    return "code_tests" in config.method.rewards
