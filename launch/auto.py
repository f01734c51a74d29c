"""What `auto` means: the options that a composition leaves to the machine, the method and one another."""

from __future__ import annotations

import functools
import os
import sys

from omegaconf import DictConfig, OmegaConf

from launch.machine import detect, masks
from launch.machine.gpu import GIB


def hardware(composed: DictConfig) -> list[str]:
    """Overrides that replace `hardware=auto` by the group of the GPUs found here, which is said on stderr. Raises HostError."""
    if composed.hardware.name != "auto":
        return []
    here = detect.gpus()
    found = masks.visible(here, os.environ)
    group = detect.group_of(found, here)
    _say(detect.found_line(found, group))
    return [f"hardware={group}"]


@functools.cache  # once, however many compositions a sweep or a pipeline makes
def _say(line: str) -> None:
    print(line, file=sys.stderr)


def others(composed: DictConfig) -> list[str]:
    """Overrides for every other group left at `auto`."""
    choices = {
        "precision": lambda: "nf4" if composed.adapter.quantize_base else next(iter(composed.hardware.precisions), "fp32"),
        "topology": lambda: topology(composed),
        "container": lambda: container(composed),
        "runtime": lambda: runtime(composed),
    }
    found = [f"{group}={choose()}" for group, choose in choices.items() if composed[group].name == "auto"]
    spread = "topology=split" in found and not fits(composed) and OmegaConf.is_missing(composed.topology, "strategy")
    return [*found, "topology.strategy=fsdp"] if spread else found


def topology(composed: DictConfig) -> str:
    """A method's own. One GPU: single. GRPO on several of one node: split, where vLLM runs. Else ddp, or fsdp when one GPU cannot hold a
    replica."""
    gpus, nodes = composed.topology.num_gpus or composed.hardware.gpus_per_node, composed.runtime.slurm.nodes
    if composed.method.topologies:
        return str(composed.method.topologies[0 if gpus * nodes == 1 else -1])
    if gpus * nodes == 1:
        return "single"
    if composed.method.name == "grpo" and composed.hardware.vllm and nodes == 1:
        return "split"
    return "ddp" if fits(composed) else "fsdp"


def fits(composed: DictConfig) -> bool:
    """Whether one GPU holds all of the training state. 20 bytes a parameter: fp32 weights, gradients and two AdamW moments
    (arXiv:1910.02054, section 3.1) and the buckets that DDP reduces gradients in; 4 more for the model that DPO compares with. A fifth of
    the memory is left to activations."""
    width = 24 if composed.method.name == "dpo" else 20
    return bool(width * composed.model.num_parameters / 1e9 < 0.8 * GIB * composed.hardware.memory_gb)


def runtime(composed: DictConfig) -> str:
    """docker on AMD GPUs, whose stack is an image, and where an image was asked for; else local."""
    if composed.runtime.name != "auto":
        return str(composed.runtime.name)
    if composed.container.name not in ("auto", "none"):
        return "docker"
    on_amd = str(composed.hardware.gfx).startswith("gfx")
    return "docker" if on_amd and composed.container.name == "auto" and not composed.smoke else "local"


def container(composed: DictConfig) -> str:
    """The hardware's image; under smoke=true, which computes on the CPU, the CPU's."""
    chosen = runtime(composed)
    if chosen == "local" or (chosen == "slurm" and composed.runtime.slurm.inner.name == "local"):
        return "none"
    return "cpu" if composed.smoke else str(composed.hardware.container)
