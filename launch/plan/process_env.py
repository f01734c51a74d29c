"""Compute the environment of a process: each variable is set in one place, with reason and source.

A user's own value wins.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from launch.inputs import paths
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.placement import MASK
from launch.schema import Config
from launch.schema.enums import Debug, Vendor, When
from launch.schema.plan import Setting
from launch.schema.variables import CPU_CACHE_GIB, INSIDE, SECRET

ROOT = Path(__file__).parents[2]
ADDED_TO = ("PYTHONPATH",)  # the user's own value stays, after ours
# The shell's variables that a container also gets: variables of the software stack, which change
# numbers or speed.
PASSED = re.compile(r"^(HIP_|HSA_|NCCL_|RCCL_|MIOPEN_|PYTORCH_|VLLM_|HF_|GPU_MAX_)")
# Variables that make a fault name its kernel, and make the run slow. Sources: AMD's workload guide
# (debug agent), HIP's and PyTorch's lists.
UNCACHED = "every tensor is its own allocation, so an overrun faults"
DEBUG_NVIDIA = (
    ("CUDA_LAUNCH_BLOCKING", "1", "launches are synchronous, so a fault names its kernel"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", UNCACHED),
)
AGENT = "/opt/rocm/lib/librocm-debug-agent.so.2"
DEBUG_AMD = (
    ("HSA_TOOLS_LIB", AGENT, "the debug agent prints the faulting wave"),
    ("HSA_TOOLS_REPORT_LOAD_FAILURE", "1", "reports a missing debug agent"),
    ("HSA_ENABLE_DEBUG", "1", "the agent needs it"),
    ("AMD_SERIALIZE_KERNEL", "3", "waits around every kernel, so the last one is at fault"),
    ("AMD_SERIALIZE_COPY", "3", "the same for copies"),
    ("PYTORCH_NO_HIP_MEMORY_CACHING", "1", UNCACHED),
    ("HSA_DISABLE_FRAGMENT_ALLOCATOR", "1", "ROCr merges no allocations: exact addresses"),
)


def settings(
    config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path, ranks: int = 1
) -> list[Setting]:
    """Return the variables of a process group, sorted by name."""
    rows = DEBUG_NVIDIA if config.hardware.vendor == Vendor.nvidia else DEBUG_AMD
    debug = [
        Setting(name, value, f"debug=memory_fault: {why}", "launcher") for name, value, why in rows
    ]
    settings = [
        *_launcher(config, host, kind, gpus, run_dir, ranks),
        *_vllm(config, kind),
        *_hardware(config, kind, len(gpus)),
        *(debug if config.debug != Debug.none else ()),
    ]
    if config.runtime.on_node == "docker":
        settings += _container(config, host)
    chosen = {s.name: s for s in settings}
    # visible_gpus has read the shell's mask and narrows it here. Variables that only a container
    # has are not the shell's.
    ours = (MASK.get(config.hardware.vendor), *ADDED_TO, *INSIDE)
    for name, setting in chosen.items():
        if name in host.environ and name not in ours and setting.origin != "yours":
            why = f"set in your shell (here it would be {setting.value})"
            chosen[name] = Setting(name, host.environ[name], why, "yours")
    for name, value in config.user_env.items():
        if name not in ADDED_TO:
            instead = f" (here it would be {chosen[name].value})" if name in chosen else ""
            chosen[name] = Setting(name, value, f"set by user_env.{name}{instead}", "yours")
    return [chosen[name] for name in sorted(chosen)]


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


def _launcher(
    config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path, ranks: int
) -> list[Setting]:
    vendor = config.hardware.vendor
    settings: list[Setting] = []

    def add(name: str, value: object, why: str) -> None:
        settings.append(Setting(name, str(value), why, "launcher"))

    # stand-ins for vLLM on a CPU and the gloo plugin, then the user's folders
    folders, smoke = [str(ROOT)], ROOT / "recipes/smoke"
    if vendor == Vendor.none and (config.topology.servers or generates(config, config.method.kind)):
        folders.append(str(smoke))
    if config.topology.servers and placement.backend(config) == "gloo":
        folders.append(str(smoke / "plugin"))
    path = os.pathsep.join([*folders, *own_python_path(config, host)])
    add("PYTHONPATH", path, "recipes/ of this repository, then your own")
    add("PYTHONSAFEPATH", 1, "a folder `recipes` in the current directory must not hide ours")
    add("PYTHONHASHSEED", 0, "sets iterate in the same order in every run; read at start only")
    if not generates(config, kind) or not gpus:
        # vLLM on a GPU defaults to one thread, which leaves the cores to its scheduler.
        why = f"{host.num_cores} cores over {ranks} rank(s); torchrun would set 1"
        add("OMP_NUM_THREADS", max(1, host.num_cores // ranks), why)
    if kind == "trainer":
        why = "seconds to save after SIGTERM, as long as the launcher waits; torchrun gives only 30"
        add("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", config.runtime.stop_timeout_s, why)
    if not gpus:
        # A step of the tiny model on two busy cores took 2.28 s with spinning threads, 0.035 s with
        # sleeping ones.
        why = "OpenMP's waiting threads would spin, and take shared cores from those they wait for"
        add("OMP_WAIT_POLICY", "PASSIVE", why)
    if gpus:
        mask = ",".join(map(str, gpus))
        add(MASK[vendor], mask, "the GPUs of this process; the only mask that is set")
    elif kind == "exporter" and vendor in MASK:
        add(MASK[vendor], -1, "an export needs no GPU and leaves them free")
    # Between nodes nothing is guessed. `=` means exactly this interface, not every interface with
    # this prefix (NCCL's environment variables).
    slurm = config.runtime.slurm
    for name, setting, why in (
        ("NCCL_SOCKET_IFNAME", slurm.interface and f"={slurm.interface}", "interface"),
        ("GLOO_SOCKET_IFNAME", slurm.interface, "interface"),
        ("NCCL_IB_HCA", slurm.hca, "hca"),
        ("NCCL_IB_GID_INDEX", slurm.gid_index, "gid_index: the RoCE v2 address of the port"),
    ):
        if setting is not None:
            add(name, setting, f"runtime.slurm.{why}")
    if kind == "trainer" and config.tracking.name == "tensorboard":
        # transformers 5 reads the directory only from here.
        why = "event files stay in the run directory"
        add("TENSORBOARD_LOGGING_DIR", run_dir / "tensorboard", why)
    return settings


def _vllm(config: Config, kind: str) -> list[Setting]:
    """Return variables of processes in which vLLM runs."""
    vendor, rows = config.hardware.vendor, list[tuple[str, object, str]]()
    if kind == "server":
        why = "opens the weight-update endpoints; the server is bound to loopback"
        rows.append(("VLLM_SERVER_DEV_MODE", 1, why))
        # With an API server slowed to 15% of a core and 96 sequences in flight, a pause took 4-9 s
        # at vLLM's default of 128, and 0.1-0.3 s at 16.
        why = "outputs between other requests, so that a slow host's weight transfer waits for few"
        rows.append(("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", 16, why))
    if generates(config, kind):
        rows.append(("VLLM_NO_USAGE_STATS", 1, "vLLM otherwise sends usage statistics"))
        if vendor == Vendor.none:
            why = "the trainers need the same few cores"
            rows.append(("VLLM_CPU_OMP_THREADS_BIND", "nobind", why))
            if not config.topology.server_cache_gb:  # the variable would override it
                why = "GiB for the cache; vLLM otherwise takes half of the memory"
                rows.append(("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB, why))
    uses_vllm = generates(config, kind) or config.topology.name == "colocate"
    if uses_vllm and vendor == Vendor.nvidia:
        why = "flashinfer, vLLM's default on NVIDIA, is not in our environment"
        rows.append(("VLLM_USE_FLASHINFER_SAMPLER", 0, why))
    return [Setting(name, str(value), why, "launcher") for name, value, why in rows]


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


def _container(config: Config, host: Host) -> list[Setting]:
    """Return what a process without a home and user name needs, and the shell's PASSED values."""
    home = paths.home(config, host)
    no_name = "the caller's uid has no name in the image; torch asks for one"
    pycache = "the image is read-only without bytecode, so every start would compile for 10 s"
    inductor = (
        "keeps compiled kernels for the next run; the default, /tmp, is lost with the container"
    )
    rows = (
        ("HOME", home, "the caller's uid has no home directory in the image"),
        ("USER", "recipes", no_name),
        ("LOGNAME", "recipes", no_name),
        ("PYTHONPYCACHEPREFIX", home / "pycache", pycache),
        ("TORCHINDUCTOR_CACHE_DIR", home / "inductor", inductor),
        ("HF_HOME", paths.hub_cache(host), "your own cache of the hub"),
    )
    settings = [Setting(name, str(value), why, "launcher") for name, value, why in rows]
    withheld = {*INSIDE, *MASK.values(), *secret_names(config, host.environ)}
    for name, value in host.environ.items():
        # In a container, a path of this machine means another place or nothing.
        if PASSED.match(name) and name not in withheld and not value.startswith(("/", "~", ".")):
            settings.append(Setting(name, value, "set in your shell", "yours"))
    return settings


def _hardware(config: Config, kind: str, num_gpus: int) -> list[Setting]:
    sends_weights = (
        config.topology.servers > 0
        and kind in ("server", "trainer")
        and placement.backend(config) == "nccl"
    )
    applies = {
        When.always: True,
        When.trainer: kind == "trainer",
        When.server: generates(config, kind),
        When.multi_gpu: num_gpus * config.runtime.slurm.nodes > 1 or sends_weights,
        When.fsdp: kind == "trainer" and config.topology.strategy in ("fsdp", "zero3"),
        When.eight_gpus: num_gpus == 8,
    }
    return [
        Setting(name, variable.value, f"{variable.reason} [{variable.source}]", "hardware")
        for name, variable in config.hardware.env.items()
        if applies[variable.when]
    ]
