"""Resolve `auto`: options that follow from the machine, the method and one another."""

from __future__ import annotations

import functools
import os
import sys

from omegaconf import DictConfig, OmegaConf

from launch.machine import detect, masks
from launch.machine.gpu import GIB
from launch.machine.placement import shares_gpu
from launch.schema import Config
from launch.schema.enums import Reference


def hardware(composed: DictConfig) -> list[str]:
    """Return the override for `hardware=auto`, and print the GPUs found. Raises HostError."""
    if composed.hardware.name != "auto":
        return []
    all_gpus = detect.gpus()
    gpus = masks.visible(all_gpus, os.environ)
    group = detect.group_of(gpus, all_gpus)
    _say(detect.detection_line(gpus, group))
    return [f"hardware={group}"]


@functools.cache  # once per process, however many compositions a sweep or a pipeline makes
def _say(line: str) -> None:
    print(line, file=sys.stderr)


def others(composed: DictConfig) -> list[str]:
    """Return overrides for every other group left at `auto`."""
    choices = {
        "precision": precision,
        "topology": topology,
        "container": container,
        "runtime": runtime,
    }
    overrides = [
        f"{group}={choose(composed)}"
        for group, choose in choices.items()
        if composed[group].name == "auto"
    ]
    if (
        "topology=split" in overrides
        and not fits(composed)
        and OmegaConf.is_missing(composed.topology, "strategy")
    ):
        overrides.append("topology.strategy=fsdp")
    return overrides


def precision(composed: DictConfig) -> str:
    """Return 4-bit weights for a quantized base, else the hardware's preferred precision."""
    if composed.adapter.quantize_base:
        return "nf4"
    return str(next(iter(composed.hardware.precisions), "fp32"))


def topology(composed: DictConfig) -> str:
    """Return the method's own topology, or `single` on one GPU.

    On several GPUs, return `split` if the method generates and vLLM runs; else `ddp`, or `fsdp` if
    one GPU cannot hold a replica.
    """
    nodes = composed.runtime.slurm.nodes
    gpus = nodes * (composed.topology.num_gpus or composed.hardware.gpus_per_node)
    if composed.method.topologies:
        return str(composed.method.topologies[0 if gpus == 1 else -1])
    if gpus == 1:
        return "single"
    if composed.method.generates and composed.hardware.vllm and nodes == 1:
        return "split"
    return "ddp" if fits(composed) else "fsdp"


def fits(composed: DictConfig) -> bool:
    """Return whether one GPU holds all of the training state.

    It takes 20 bytes per parameter: fp32 weights, gradients and two AdamW moments
    (arXiv:1910.02054, section 3.1), and the buckets in which DDP reduces gradients. A reference
    model takes 4 more. A fifth of the memory is left to activations.
    """
    width = 24 if composed.method.reference == Reference.always else 20
    state_gb = width * composed.model.num_parameters / 1e9
    return bool(state_gb < 0.8 * GIB * composed.hardware.memory_gb)


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
    """Return docker if an image is given, or on AMD GPUs, for which we build images; else local."""
    if composed.runtime.name != "auto":
        return str(composed.runtime.name)
    if composed.container.name not in ("auto", "none"):
        return "docker"
    on_amd = str(composed.hardware.gfx).startswith("gfx")
    in_image = on_amd and composed.container.name == "auto" and not composed.smoke
    return "docker" if in_image else "local"


def container(composed: DictConfig) -> str:
    """Return the hardware's image; the CPU's under smoke=true, which runs there."""
    where = runtime(composed)
    if where == "local" or (where == "slurm" and composed.runtime.slurm.inner.name == "local"):
        return "none"
    return "cpu" if composed.smoke else str(composed.hardware.container)
