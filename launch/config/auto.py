"""Choose an option for each group left at `auto`, from the machine, the method and other groups."""

from __future__ import annotations

import functools
import os
import sys

from omegaconf import DictConfig, OmegaConf

from launch.machine import detect, inside, masks
from launch.machine.gpu import GIB
from launch.machine.placement import shares_gpu
from launch.schema import Config
from launch.schema.enums import Reference, Use, Vendor

LARGE_MODEL = 500e6  # parameters


def hardware(composed: DictConfig) -> list[str]:
    """Return the override that replaces `hardware=auto`, if any, and print the GPUs.

    Raises HostError.
    """
    if composed.hardware.name != "auto":
        return []
    all_gpus = detect.gpus()
    gpus = masks.visible(all_gpus, os.environ)
    group = detect.group_of(gpus, all_gpus)
    _print_once(detect.detection_line(gpus, group))
    return [f"hardware={group}"]


@functools.cache  # a sweep or a pipeline composes many times
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def other_groups(composed: DictConfig) -> list[str]:
    """Return overrides for all groups but hardware that are left at `auto`."""
    choices = {
        "precision": precision,
        "topology": topology,
        "container": container,
        "runtime": runtime,
        "data": data,
    }
    overrides = [
        f"{group}={choose(composed)}"
        for group, choose in choices.items()
        if composed[group].name == "auto"
    ]
    has_vllm = "topology=split" in overrides or composed.topology.name in ("split", "colocate")
    if has_vllm and OmegaConf.is_missing(composed.topology, "strategy"):
        overrides.append(f"topology.strategy={strategy_of_trainers(composed)}")
    if "precision=fp16" in overrides and OmegaConf.is_missing(composed.precision, "weights"):
        overrides.append("precision.weights=fp16")
    return overrides


def precision(composed: DictConfig) -> str:
    """Return nf4 for a quantized base, otherwise the preferred precision of the hardware.

    A model that is only used gets 16-bit weights where its fp32 weights would not fit.
    """
    if composed.adapter.quantize_base:
        return "nf4"
    preferred = str(next(iter(composed.hardware.precisions), "fp32"))
    hardware, is_used = composed.hardware, composed.method.kind in ("evaluator", "chat")
    weights_gb = 4 * composed.model.num_parameters / 1e9
    is_large = hardware.vendor != Vendor.none and weights_gb > 0.8 * GIB * hardware.memory_gb
    if preferred == "fp32" and is_used and is_large and "fp16" in hardware.precisions:
        return "fp16"
    return preferred


def topology(composed: DictConfig) -> str:
    """Return the topology for the method and the number of GPUs.

    If the method lists topologies, the first is for one GPU and the last for several. Otherwise it
    is `single` on one GPU. On several it is `split` if the method generates and vLLM supports the
    GPU, `ddp` if a replica fits on one GPU or its weights are nf4, or `fsdp`.
    """
    gpus = _num_gpus(composed)
    if composed.method.topologies:
        return str(composed.method.topologies[0 if gpus == 1 else -1])
    if gpus == 1:
        return "single"
    if composed.method.generates and composed.hardware.vllm and composed.runtime.slurm.nodes == 1:
        return "split"
    return "ddp" if _is_replicated(composed) else "fsdp"


def strategy_of_trainers(composed: DictConfig) -> str:
    """Return how the trainers of GRPO with vLLM share the model.

    A single one has nothing to share.
    """
    topology = composed.topology
    if topology.name == "colocate":
        trainers, alone = topology.num_gpus or 1, "none"
    else:
        servers = topology.servers if isinstance(topology.servers, int) else 1  # it may be auto
        serving = max(1, servers) * topology.server_tensor_parallel
        trainers, alone = _num_gpus(composed) - serving, "ddp"
    if trainers <= 1:
        return alone
    return "ddp" if _is_replicated(composed) else "fsdp"


def _num_gpus(composed: DictConfig) -> int:
    nodes = composed.runtime.slurm.nodes
    return int(nodes * (composed.topology.num_gpus or composed.hardware.gpus_per_node))


def data(composed: DictConfig) -> str:
    """Return harder problems for a pretrained model whose answers are judged.

    Large models solve all sums of `reasoning`, so that GRPO would learn nothing.
    """
    is_judged = composed.method.uses_rewards != Use.none
    is_large = composed.model.num_parameters >= LARGE_MODEL
    return "reasoning_hard" if is_judged and is_large else "reasoning"


def _is_replicated(composed: DictConfig) -> bool:
    """Return whether each GPU should hold all weights. Those of nf4 cannot be sharded."""
    is_nf4 = composed.adapter.quantize_base or composed.precision.get("weights") == "nf4"
    return bool(is_nf4) or fits_on_one_gpu(composed)


def fits_on_one_gpu(composed: DictConfig | Config) -> bool:
    """Return whether the complete training state fits on one GPU.

    The state has 16 bytes per parameter: fp32 weights, gradients and two AdamW moments
    (arXiv:1910.02054, section 3.1). A reference model adds 4 bytes. With an adapter, only the
    weights count. The planner's error and three tenths of the memory, for activations, are left.
    """
    bytes_per_parameter = 20 if composed.method.reference == Reference.always else 16
    if composed.adapter.rank is not None:
        bytes_per_parameter = 4
    state_gb = bytes_per_parameter * composed.model.num_parameters / 1e9
    most_gb = state_gb * (1 + composed.hardware.memory_error)
    return bool(most_gb < 0.7 * GIB * composed.hardware.memory_gb)


def overlap(config: Config) -> bool:
    """Return whether the server generates the next batch while this one trains.

    The policy learns what it does by turns (docs/results/learning_modes.md). The server needs its
    own GPUs, the loss its importance-sampling correction, and steps must not wait for evaluations.
    """
    return (
        config.topology.name == "split"
        and not shares_gpu(config)
        and config.method.selection.metric is None
        and config.method.args.get("vllm_importance_sampling_correction") is not False
    )


def runtime(composed: DictConfig) -> str:
    """Return docker if an image is set or AMD's GPUs have one; otherwise local.

    A rented container has no docker engine, and is itself a container of an image.
    """
    if composed.runtime.name != "auto":
        return str(composed.runtime.name)
    if composed.container.name not in ("auto", "none"):
        return "docker"
    on_amd = str(composed.hardware.gfx).startswith("gfx")
    has_image = on_amd and composed.hardware.container != "none"
    in_image = has_image and composed.container.name == "auto" and not composed.smoke
    if in_image and inside.rented(os.environ):
        _print_once("runtime=auto: a container without a docker engine: runtime=local")
        return "local"
    return "docker" if in_image else "local"


def container(composed: DictConfig) -> str:
    """Return the image of the hardware, or `cpu` under smoke=true; `none` outside containers."""
    name = runtime(composed)
    if name == "local" or (name == "slurm" and composed.runtime.slurm.container.name == "none"):
        return "none"
    return "cpu" if composed.smoke else str(composed.hardware.container)
