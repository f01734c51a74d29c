"""Compute the environment of a process: each variable is set in one place, with reason and source.

A user's own value wins.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

from launch.core.json_files import yaml_file
from launch.inputs import paths
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.placement import MASK
from launch.schema import Config
from launch.schema.enums import Debug, Vendor
from launch.schema.plan import Setting
from launch.schema.variables import CONTAINER_VARIABLES, CPU_CACHE_GIB, SECRET

ROOT = Path(__file__).parents[2]
ADDED_TO = ("PYTHONPATH",)  # the user's own value stays, after ours
# The shell's variables that a container also gets: variables of the software stack, which change
# numbers or speed.
PASSED = re.compile(r"^(HIP_|HSA_|NCCL_|RCCL_|MIOPEN_|PYTORCH_|VLLM_|HF_|GPU_MAX_)")


def settings(
    config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path, ranks: int = 1
) -> list[Setting]:
    """Return the variables of a process group, sorted by name."""
    when = _conditions(config, kind, gpus)
    words = _words(config, host, gpus, run_dir, ranks)
    chosen = {
        name.format(**words): Setting(
            name.format(**words), value.format(**words), why.format(**words), "launcher"
        )
        for name, value, condition, why in _table()["launcher"]
        if when[condition]
    }
    for name, variable in config.hardware.env.items():
        if when[variable.when.name]:
            why = f"{variable.reason} [{variable.source}]"
            chosen[name] = Setting(name, variable.value, why, "hardware")
    for name, value, condition, why in (*_table()["debug"], *_table()["container"]):
        if when[condition]:
            chosen[name] = Setting(name, value.format(**words), why, "launcher")
    if when["container"]:
        withheld = {*CONTAINER_VARIABLES, *MASK.values(), *secret_names(config, host.environ)}
        for name, value in host.environ.items():
            # In a container, a path of this machine means another place or nothing.
            is_path = value.startswith(("/", "~", "."))
            if PASSED.match(name) and name not in withheld and not is_path:
                chosen[name] = Setting(name, value, "set in your shell", "yours")
    # visible_gpus has read the shell's mask and narrows it here. Variables that only a container
    # has are not the shell's.
    ours = (MASK.get(config.hardware.vendor), *ADDED_TO, *CONTAINER_VARIABLES)
    for name, setting in chosen.items():
        if name in host.environ and name not in ours and setting.origin != "yours":
            why = f"set in your shell (here it would be {setting.value})"
            chosen[name] = Setting(name, host.environ[name], why, "yours")
    for name, value in config.user_env.items():
        if name not in ADDED_TO:
            instead = f" (here it would be {chosen[name].value})" if name in chosen else ""
            chosen[name] = Setting(name, value, f"set by user_env.{name}{instead}", "yours")
    return [chosen[name] for name in sorted(chosen)]


@functools.cache
def _table() -> dict[str, list[list[str]]]:
    """Return [name, value, condition, reason] of each variable, by who sets it."""
    table: dict[str, list[list[str]]] = yaml_file(Path(__file__).with_name("environment.yaml"))
    return table


def _conditions(config: Config, kind: str, gpus: list[int]) -> dict[str, bool]:
    """Return which conditions of environment.yaml and conf/hardware hold for a process group."""
    vendor, topology, slurm = config.hardware.vendor, config.topology, config.runtime.slurm
    trains, serves, runs_vllm = kind == "trainer", kind == "server", generates(config, kind)
    on_cpu, is_faulty = vendor == Vendor.none, config.debug != Debug.none
    sends_weights = (
        topology.servers > 0 and (serves or trains) and placement.backend(config) == "nccl"
    )
    return {
        "always": True,
        "trainer": trains,
        "server": runs_vllm,
        "multi_gpu": len(gpus) * slurm.nodes > 1 or sends_weights,
        "fsdp": trains and topology.strategy in ("fsdp", "zero3"),
        "eight_gpus": len(gpus) == 8,
        "gpu": bool(gpus),
        "no_gpu": not gpus,
        "gpu_exporter": kind == "exporter" and vendor in MASK and not gpus,
        "own_threads": not runs_vllm or not gpus,
        "interface": slurm.interface is not None,
        "hca": slurm.hca is not None,
        "gid_index": slurm.gid_index is not None,
        "tensorboard": trains and config.tracking.name == "tensorboard",
        "serves": serves,
        "generates_on_cpu": runs_vllm and on_cpu,
        "sizes_cache_on_cpu": runs_vllm and on_cpu and not topology.server_cache_gb,
        "vllm_on_nvidia": (runs_vllm or topology.name == "colocate") and vendor == Vendor.nvidia,
        "debug_nvidia": is_faulty and vendor == Vendor.nvidia,
        "debug_amd": is_faulty and vendor != Vendor.nvidia,
        "container": config.runtime.on_node == "docker",
    }


def _words(
    config: Config, host: Host, gpus: list[int], run_dir: Path, ranks: int
) -> dict[str, object]:
    """Return the values for the names in braces in environment.yaml."""
    # stand-ins for vLLM on a CPU and the gloo plugin, then the user's folders
    folders, smoke = [str(ROOT)], ROOT / "recipes/smoke"
    runs_vllm = config.topology.servers or generates(config, config.method.kind)
    if config.hardware.vendor == Vendor.none and runs_vllm:
        folders.append(str(smoke))
    if config.topology.servers and placement.backend(config) == "gloo":
        folders.append(str(smoke / "plugin"))
    slurm = config.runtime.slurm
    return {
        "path": os.pathsep.join([*folders, *own_python_path(config, host)]),
        "threads": max(1, host.num_cores // ranks),
        "num_cores": host.num_cores,
        "ranks": ranks,
        "stop_s": config.runtime.stop_timeout_s,
        "mask": MASK.get(config.hardware.vendor),
        "gpus": ",".join(map(str, gpus)),
        **{name: getattr(slurm, name) for name in ("interface", "hca", "gid_index")},
        "run_dir": run_dir,
        "cache_gib": CPU_CACHE_GIB,
        "home": paths.home(config, host),
        "hub_cache": paths.hub_cache(host),
    }


def secret_names(config: Config, environ: dict[str, str]) -> set[str]:
    """Return the shell's variables that hold a secret, by their name or runtime.secrets."""
    return {name for name in environ if SECRET.search(name)} | set(config.runtime.secrets)


def leaked(node: Any, secrets: set[str], at: str = "") -> str | None:
    """Return the key that holds one of these values, as by ${oc.env:HF_TOKEN}, or None."""
    if isinstance(node, dict):
        keys = (leaked(v, secrets, f"{at}.{k}" if at else str(k)) for k, v in node.items())
        return next((key for key in keys if key), None)
    if isinstance(node, list):
        return next((key for key in (leaked(item, secrets, at) for item in node) if key), None)
    return at if isinstance(node, str) and any(secret in node for secret in secrets) else None


def generates(config: Config, kind: str) -> bool:
    """Return whether vLLM runs here by itself: a server, a benchmark, a tuning, or engine=vllm."""
    return (
        kind == "server" or config.method.starts_vllm or config.method.args.get("engine") == "vllm"
    )


def own_python_path(config: Config, host: Host) -> list[str]:
    """Return the user's own folders and, for a reward of the user's, the current directory.

    A container does not get the shell's PYTHONPATH, which is for this machine's Python.
    """
    shell = None if config.runtime.on_node == "docker" else host.environ.get("PYTHONPATH")
    path = config.user_env.get("PYTHONPATH", shell)
    own_reward = any("." in name for name in config.method.rewards)
    return [*filter(None, (path or "").split(os.pathsep)), *([host.cwd] if own_reward else [])]
