"""Decide the process groups of a run and the GPUs of each."""

from dataclasses import dataclass

from launch.core.errors import HostError
from launch.machine import masks
from launch.machine.detect import Host
from launch.schema import Config
from launch.schema.enums import Profile, Vendor

MASK = {Vendor.amd: "HIP_VISIBLE_DEVICES", Vendor.nvidia: "CUDA_VISIBLE_DEVICES"}


def num_gpus(config: Config) -> int:
    """Return the number of GPUs that the run uses on a node; on a CPU, the number of processes."""
    if config.topology.num_gpus is not None:
        return config.topology.num_gpus
    return 1 if config.topology.name in ("single", "colocate") else config.hardware.gpus_per_node


def num_server_gpus(config: Config) -> int:
    return config.topology.servers * config.topology.server_tensor_parallel


def num_trainers(config: Config) -> int:
    """Return the number of ranks that train, on all nodes."""
    return trainers_of_a_node(config) * trainer_nodes(config)


def serves_apart(config: Config) -> bool:
    """Return whether the server has a node of its own: the last of several."""
    return config.topology.servers > 0 and config.runtime.slurm.nodes > 1


def trainer_nodes(config: Config) -> int:
    return config.runtime.slurm.nodes - serves_apart(config)


def trainers_of_a_node(config: Config) -> int:
    if config.method.kind == "service":  # one process for all GPUs
        return 1
    serving = 0 if serves_apart(config) else num_server_gpus(config)
    return max(1, num_gpus(config) - serving)


def starts_directly(config: Config, kind: str) -> bool:
    """Return whether a rank of this kind runs without torchrun.

    torchrun imports torch, which adds three seconds to every start. It is only needed for several
    ranks, for a strategy, and for rocprof, whose output files are named after torchrun's RANK.
    """
    if kind in ("prepare", "service"):
        return True
    is_alone = num_trainers(config) == 1 and config.topology.strategy == "none"
    is_profiled = config.profile == Profile.rocprof
    return is_alone and not is_profiled and kind in ("trainer", "evaluator", "exporter", "chat")


def creates_model(config: Config) -> bool:
    """Return whether the run must first save a model of random weights for vLLM."""
    generates = config.topology.servers > 0 or config.topology.name == "colocate"
    return generates and config.model.path is None and config.model.init.name == "random"


def is_tokens_only(config: Config) -> bool:
    """Return whether GRPO's engine can do without a tokenizer, exchanging only token ids.

    Detokenizing would take more than half of the server's time. But `stop` and `bad_words` are
    text, and vLLM silently ignores them without a tokenizer.
    """
    names = ("generation_kwargs", "vllm_structured_outputs_regex")
    return not any(config.method.args.get(name) for name in names)


@dataclass(frozen=True)
class ProcessGroup:
    """Processes of one kind on the GPUs of one node."""

    name: str
    kind: str  # as in schema.plan.Process
    gpus: list[int]
    num_ranks: int = 1
    node: int = 0


def process_groups(config: Config, host: Host) -> list[ProcessGroup]:
    """Return the groups of a run in start order."""
    gpus = visible_gpus(config, host, num_gpus(config)) if not config.method.exports else []
    server_gpus, gpus_of_ranks = gpus[: num_server_gpus(config)], gpus[num_server_gpus(config) :]
    if shares_gpu(config) or serves_apart(config):
        gpus_of_ranks = gpus
    groups = []
    if creates_model(config):
        groups.append(ProcessGroup("prepare", "prepare", gpus_of_ranks[:1]))
    if config.topology.servers:
        node = trainer_nodes(config) if serves_apart(config) else 0
        groups.append(ProcessGroup("server", "server", server_gpus, num_server_gpus(config), node))
    kind, ranks = config.method.kind, trainers_of_a_node(config)
    name = "trainers" if kind == "trainer" else kind
    # The launcher stops groups in reverse order. It begins with the ranks on its own node (0),
    # because a signal to one rank stops all.
    for node in [*range(1, trainer_nodes(config)), 0]:
        node_name = f"{name}-{node}" if node else name
        groups.append(ProcessGroup(node_name, kind, gpus_of_ranks, ranks, node))
    return groups


def visible_gpus(config: Config, host: Host, count: int) -> list[int]:
    """Return the indices of the first `count` GPUs of the user's mask or of the host; [] on a CPU.

    Raises HostError for a mask that does not choose `count` GPUs.
    """
    return chosen_gpus(config, host, count) if config.hardware.vendor in MASK else []


def chosen_gpus(config: Config, host: Host, count: int) -> list[int]:
    """Return the indices of visible_gpus, even if smoke=true replaces the GPU by the CPU."""
    is_amd = config.hardware.gfx.startswith("gfx")
    if is_amd and masks.ROCR in host.environ:
        raise HostError(
            "ROCR_VISIBLE_DEVICES is set. Together with HIP_VISIBLE_DEVICES, ROCm miscounts GPUs "
            "(pytorch/pytorch#140398) and RCCL's weight transfer fails. Use: unset "
            "ROCR_VISIBLE_DEVICES, and HIP_VISIBLE_DEVICES=<indices>."
        )
    variables = masks.active(masks.AMD if is_amd else masks.NVIDIA, host.environ)
    if not variables:
        return list(range(count))
    (name, mask), *others = variables.items()
    indices = [int(part) for part in mask.split(",") if part.strip().isdigit()]
    problem = None
    if conflicts := [other for other, other_mask in others if other_mask != mask]:
        other = conflicts[0]
        problem = f"it conflicts with {other}={variables[other]}. Use: unset {other}."
    elif len(indices) < len(mask.split(",")):
        problem = f"expected indices. Use: {name}=0,1, for example."
    elif len(set(indices)) < len(indices):
        problem = "it contains a GPU twice. Use: each index once."
    elif len(indices) < count:
        problem = f"{len(indices)} GPUs, but this topology needs {count}. Use: a mask of {count} "
        problem += f"GPUs, or topology.num_gpus={len(indices)}."
    if problem:
        raise HostError(f"{name}={mask}: {problem}")
    return indices[:count]


def shares_gpu(config: Config) -> bool:
    """Return whether the server and a single trainer share the only GPU."""
    gpus = config.topology.num_gpus or config.hardware.gpus_per_node
    is_alone = gpus == 1 and not serves_apart(config)
    return config.topology.servers != 0 and is_alone and config.hardware.vendor != Vendor.none


def backend(config: Config) -> str:
    """Return nccl, which is RCCL on AMD; gloo for CPUs and for two processes on one GPU."""
    return "gloo" if config.hardware.vendor == Vendor.none or shares_gpu(config) else "nccl"


def needs_sandbox(config: Config) -> bool:
    """Return whether a reward runs code that the model wrote."""
    return "code_tests" in config.method.rewards
