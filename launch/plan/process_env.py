"""Compute the environment variables of a process group, each with its reason.

A value that the user sets takes precedence.
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from containers import images
from launch.core.json_files import yaml_file
from launch.inputs import paths
from launch.machine import masks, placement
from launch.machine.detect import DKMS, IN_TREE, Host
from launch.machine.placement import MASK
from launch.plan import inherited
from launch.schema import Config
from launch.schema.enums import Debug, Vendor
from launch.schema.plan import Setting
from launch.schema.variables import CONTAINER_VARIABLES, CPU_CACHE_GIB, GPU_STACK, is_secret

ROOT = Path(__file__).parents[2]
HUB_TRUE = ("1", "ON", "YES", "TRUE")  # huggingface_hub.constants
APPENDED_TO = ("PYTHONPATH",)  # the user's value is appended to ours


def settings(
    config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path, ranks: int = 1
) -> list[Setting]:
    """Return the variables of a process group with `ranks` ranks, sorted by name."""
    image = images.load().get(config.container.name)  # None for the user's own image
    of_image = image.env if image and config.runtime.in_container else {}
    applies = _conditions(config, host, kind, gpus) | {
        "image_caches_triton": "TRITON_CACHE_DIR" in of_image
    }
    values = _values(config, host, gpus, run_dir, ranks)
    settings = {
        name.format(**values): Setting(
            name.format(**values), value.format(**values), reason.format(**values), "launcher"
        )
        for name, value, condition, reason in _table()["launcher"]
        if applies[condition]
    }
    for name, variable in config.hardware.env.items():
        if applies[variable.when.name]:
            reason = f"{variable.reason} [{variable.source}]"
            settings[name] = Setting(name, variable.value, reason, "hardware")
    for name, value, condition, reason in (*_table()["debug"], *_table()["container"]):
        if applies[condition]:
            settings[name] = Setting(name, value.format(**values), reason, "launcher")
    if applies["container"]:
        for name, value in passed_to_containers(config, host).items():
            settings[name] = Setting(name, value, "set in your shell", "yours")
    # Skip the mask, which determined `gpus`, and variables that a container sets for itself.
    ours = (MASK.get(config.hardware.vendor), *APPENDED_TO, *CONTAINER_VARIABLES)
    for name, setting in settings.items():
        if name in host.environ and name not in ours and setting.origin != "yours":
            reason = f"set in your shell; the default would be {setting.value}"
            settings[name] = Setting(name, host.environ[name], reason, "yours")
    for name, value in config.user_env.items():
        if name not in APPENDED_TO:
            default = f"; the default would be {settings[name].value}" if name in settings else ""
            settings[name] = Setting(name, value, f"set by user_env.{name}{default}", "yours")
    for name, value in of_image.items():
        setting = settings.setdefault(name, Setting(name, value, "set by the image", "image"))
        if setting.value != value:
            reason = f"{setting.reason}; the image sets {value}"
            settings[name] = dataclasses.replace(setting, reason=reason)
    return [settings[name] for name in sorted(settings)]


@functools.cache
def _table() -> dict[str, list[list[str]]]:
    table: dict[str, list[list[str]]] = yaml_file(Path(__file__).with_name("environment.yaml"))
    return table


def passed_to_containers(config: Config, host: Host) -> dict[str, str]:
    """Return the shell's variables of the GPU stack, without secrets, masks and paths."""
    as_files = inherited.secret_files(config, host.environ)
    withheld = {*CONTAINER_VARIABLES, *masks.ALL, *as_files, *secret_names(config, host.environ)}
    return {
        name: value
        for name, value in host.environ.items()
        # A path of this machine does not exist in a container, or is another file there.
        if GPU_STACK.fullmatch(name) and name not in withheld and value[:1] not in ("/", "~", ".")
    }


def container_variables(home: str, hub_cache: str) -> dict[str, str]:
    """Return the variables that every container gets, for these folders."""
    folders = {"home": home, "hub_cache": hub_cache}
    return {name: value.format(**folders) for name, value, *_ in _table()["container"]}


def is_offline(config: Config, host: Host) -> bool:
    """Return whether the ranks may only read the caches of the Hub."""
    return {**host.environ, **config.user_env}.get("HF_HUB_OFFLINE", "").upper() in HUB_TRUE


def _conditions(config: Config, host: Host, kind: str, gpus: list[int]) -> dict[str, bool]:
    """Return, for each condition of environment.yaml and conf/hardware, whether it is met."""
    vendor, topology, slurm = config.hardware.vendor, config.topology, config.runtime.slurm
    trains, serves, runs_vllm = kind == "trainer", kind == "server", starts_vllm(config, kind)
    on_cpu, finds_fault = vendor == Vendor.none, config.debug == Debug.memory_fault
    sends_weights = (
        topology.servers > 0 and (serves or trains) and placement.backend(config) == "nccl"
    )
    multi_gpu = len(gpus) * slurm.nodes > 1 or sends_weights
    driver = host.amdgpu if multi_gpu and vendor == Vendor.amd else None
    return {
        "always": True,
        "trainer": trains,
        "server": runs_vllm,
        "multi_gpu": multi_gpu,
        "dkms_driver": driver == DKMS,
        "in_tree_driver": driver == IN_TREE,
        "fsdp": trains and topology.strategy in ("fsdp", "zero3"),
        "eight_gpus": len(gpus) == 8 and slurm.nodes == 1,
        "gpu": bool(gpus),
        "no_gpu": not gpus,
        "gpu_exporter": kind == "exporter" and vendor in MASK and not gpus,
        "own_threads": not runs_vllm or not gpus,
        "interface": slurm.interface is not None,
        "hca": slurm.hca is not None,
        "gid_index": slurm.gid_index is not None,
        "tensorboard": trains and config.tracking.name == "tensorboard",
        "serves": serves,
        "server_apart": trains and placement.serves_apart(config),
        "chats": kind == "chat" and runs_vllm,
        "generates_on_cpu": runs_vllm and on_cpu,
        "sizes_cache_on_cpu": runs_vllm and on_cpu and not topology.server_cache_gb,
        "vllm_on_nvidia": (runs_vllm or topology.name == "colocate") and vendor == Vendor.nvidia,
        "debug_nvidia": finds_fault and vendor == Vendor.nvidia,
        "debug_amd": finds_fault and vendor != Vendor.nvidia,
        "debug_compile": config.debug == Debug.compile,
        "container": config.runtime.in_container,
        "container_offline": config.runtime.in_container and is_offline(config, host),
    }


def _values(
    config: Config, host: Host, gpus: list[int], run_dir: Path, ranks: int
) -> dict[str, object]:
    """Return the values of the names in braces in environment.yaml."""
    folders, smoke = [str(ROOT)], ROOT / "recipes/smoke"
    runs_vllm = config.topology.servers or starts_vllm(config, config.method.kind)
    if config.hardware.vendor == Vendor.none and runs_vllm:
        folders.append(str(smoke))  # replaces vLLM on a CPU
    if config.topology.servers and placement.backend(config) == "gloo":
        folders.append(str(smoke / "plugin"))  # transfers weights by gloo
    slurm = config.runtime.slurm
    return {
        "path": os.pathsep.join([*folders, *user_python_path(config, host)]),
        "threads": max(1, host.num_cores // ranks),
        "num_cores": host.num_cores,
        "ranks": ranks,
        "stop_s": config.runtime.stop_timeout_s,
        "hang_s": config.runtime.hang_timeout_s,
        "mask": MASK.get(config.hardware.vendor),
        "gpus": ",".join(map(str, gpus)),
        **{name: getattr(slurm, name) for name in ("interface", "hca", "gid_index")},
        "master": host.environ.get("MASTER_ADDR", "$MASTER_ADDR"),
        "run_dir": run_dir,
        "cache_gib": CPU_CACHE_GIB,
        "home": paths.home(config, host),
        "hub_cache": paths.hub_cache(host),
    }


def secret_names(config: Config, environ: dict[str, str]) -> set[str]:
    """Return runtime.secrets and the variables that look like secrets."""
    return {n for n, v in environ.items() if is_secret(n, v)} | set(config.runtime.secrets)


def key_of_secret(node: Any, secrets: set[str], key: str = "") -> str | None:
    """Return the first nested key with one of `secrets` or a password in a URL, or None.

    `key` is `node`'s key. Such a value can come from ${oc.env:HF_TOKEN}.
    """
    if isinstance(node, dict):
        keys = (key_of_secret(v, secrets, f"{key}.{k}" if key else str(k)) for k, v in node.items())
        return next(filter(None, keys), None)
    if isinstance(node, list):
        return next(filter(None, (key_of_secret(item, secrets, key) for item in node)), None)
    leaks = isinstance(node, str) and (is_secret("", node) or any(s in node for s in secrets))
    return key if leaks else None


def starts_vllm(config: Config, kind: str) -> bool:
    """Return whether the process group starts vLLM itself, unlike a trainer under colocate.

    This is so for a server, a benchmark or tuning run of vLLM, and method.args.engine=vllm.
    """
    return (
        kind == "server" or config.method.starts_vllm or config.method.args.get("engine") == "vllm"
    )


def user_python_path(config: Config, host: Host) -> list[str]:
    """Return the user's PYTHONPATH, and the current directory for a dotted reward."""
    has_own_reward = any("." in name for name in config.method.rewards)
    return [*paths.python_path(config, host.environ), *([host.cwd] if has_own_reward else [])]
