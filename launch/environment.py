"""The environment of a process: every variable set in one place, with reason and source. A user's own value wins."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import HostError
from launch.files import paths
from launch.machine import masks
from launch.machine.detect import Host
from launch.schema import Config
from launch.schema.enums import Debug, Vendor, When
from launch.supervision import serving

# Names of variables and arguments that hold secrets. A token as in HF_TOKEN or HF_TOKEN_READ; not max_tokens, not eos_token.
SECRET = re.compile(r"((?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)TOKEN(?![A-Z])|SECRET|PASSWORD|API_?KEY|CREDENTIAL)", re.IGNORECASE)
ROOT = Path(__file__).parents[1]
ADDED_TO = ("PYTHONPATH",)  # where a user's own value is kept and ours put before it
INSIDE = ("HOME", "USER", "LOGNAME", "HF_HOME", "PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR")  # a container's own
# Variables of the user's shell that a container is given too: those of the stack, which change numbers or speed.
PASSED = re.compile(r"^(HIP_|HSA_|NCCL_|RCCL_|MIOPEN_|PYTORCH_|VLLM_|HF_|GPU_MAX_)")
CPU_CACHE_GIB = 1  # our choice: of the keys and values of a server on a CPU, where one serves a small model
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # one setting; torch takes the first of these names
MASK = {Vendor.amd: "HIP_VISIBLE_DEVICES", Vendor.nvidia: "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class Setting:
    """One variable of one process; `origin` is hardware, launcher or yours."""

    name: str
    value: str
    reason: str
    origin: str


def settings(config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path, ranks: int = 1) -> list[Setting]:
    """Variables of a process group of this kind on these GPUs, with so many ranks, sorted by name."""
    settings = [*_launcher(config, host, kind, gpus, run_dir, ranks), *_hardware(config, kind, len(gpus)), *_debug(config)]
    if config.runtime.on_node == "docker":
        settings += _container(config, host)
    chosen = {s.name: s for s in settings}
    mask = MASK.get(config.hardware.vendor)
    for name in chosen:
        # The mask is read in visible_gpus, and narrowed here; what is only the container's has no value of the shell's.
        if name in host.environ and name not in (mask, *ADDED_TO, *INSIDE) and chosen[name].origin != "yours":
            chosen[name] = Setting(name, host.environ[name], f"set in your shell (here it would be {chosen[name].value})", "yours")
    for name, value in config.user_env.items():
        if name in ADDED_TO:
            continue
        instead = f" (here it would be {chosen[name].value})" if name in chosen else ""
        chosen[name] = Setting(name, value, f"set by user_env.{name}{instead}", "yours")
    return [chosen[name] for name in sorted(chosen)]


def is_expandable(options: str) -> bool:
    """Whether these options have torch's allocator map its memory in pages."""
    return "expandable_segments:true" in options.lower().replace(" ", "")


def secret_names(config: Config, environ: dict[str, str]) -> set[str]:
    """Variables of the shell that hold a secret: by their names, or because the composition lists them."""
    return {name for name in environ if SECRET.search(name)} | set(config.runtime.secrets)


def leaked(node: Any, secrets: set[str], at: str = "") -> str | None:
    """The key of a composition that holds one of these values, for example by ${oc.env:HF_TOKEN}; or None."""
    if isinstance(node, dict):
        found = (leaked(value, secrets, f"{at}.{key}" if at else str(key)) for key, value in node.items())
        return next((key for key in found if key), None)
    if isinstance(node, list):
        return next((key for key in (leaked(item, secrets, at) for item in node) if key), None)
    return at if isinstance(node, str) and any(secret in node for secret in secrets) else None


def visible_gpus(config: Config, host: Host, wanted: int) -> list[int]:
    """Indices of the GPUs this run may use: those of the user's own mask, or the first `wanted`. Raises HostError."""
    return chosen_gpus(config, host, wanted) if config.hardware.vendor in MASK else []


def chosen_gpus(config: Config, host: Host, wanted: int) -> list[int]:
    """The same for a composition whose GPU smoke=true has replaced by the CPU."""
    is_amd = config.hardware.gfx.startswith("gfx")
    if is_amd and masks.ROCR in host.environ:
        raise HostError(
            "ROCR_VISIBLE_DEVICES is set: with HIP_VISIBLE_DEVICES beside it ROCm miscounts (pytorch/pytorch#140398) and RCCL's "
            "weight transfer fails. Unset it and choose GPUs by HIP_VISIBLE_DEVICES."
        )
    found = masks.given(masks.AMD if is_amd else masks.NVIDIA, host.environ)
    if not found:
        return list(range(wanted))
    (mask, given), *others = found.items()
    differs = next((name for name, value in others if value != given), None)
    if differs:
        raise HostError(f"{mask}={given} and {differs}={found[differs]}: two masks that differ. Keep one: unset {differs}.")
    if not all(part.strip().isdigit() for part in given.split(",")):
        raise HostError(f"{mask}={given}: indices are needed here, for example {mask}=0,1.")
    visible = [int(part) for part in given.split(",")]
    if len(set(visible)) < len(visible):
        raise HostError(f"{mask}={given}: a GPU is named twice.")
    if len(visible) < wanted:
        raise HostError(f"{mask}={given}: {len(visible)} GPUs, and this topology needs {wanted}. Widen the mask or set topology.num_gpus.")
    return visible[:wanted]


def _launcher(config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path, ranks: int) -> list[Setting]:
    found = [
        Setting("PYTHONPATH", _python_path(config, host), "recipes/ of this repository, then your own", "launcher"),
        Setting("PYTHONSAFEPATH", "1", "a folder `recipes` where the command is typed must not hide ours", "launcher"),
        Setting("PYTHONHASHSEED", "0", "sets iterate in the same order in every run; Python reads it at start", "launcher"),
    ]
    if (
        not generates(config, kind) or not gpus
    ):  # vLLM on a GPU takes one thread where nothing is said, so that the cores serve what schedules
        why = f"{host.num_cores} cores over {ranks} rank(s); torchrun would set 1"
        found.append(Setting("OMP_NUM_THREADS", str(max(1, host.num_cores // ranks)), why, "launcher"))
    if kind == "trainer":
        why = "seconds that torchrun leaves its ranks to save after SIGTERM (its own 30 kill a large save): as long as the launcher does"
        found.append(Setting("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(config.runtime.stop_timeout_s), why, "launcher"))
    if not gpus:
        # Two cores that other work kept busy too: 2.28 s a step of the tiny model with spinning threads, 0.035 s with sleeping ones.
        why = "OpenMP's threads spin while they wait; on cores they share with others that takes the time of those they wait for"
        found.append(Setting("OMP_WAIT_POLICY", "PASSIVE", why, "launcher"))
    if gpus:
        mask = MASK[config.hardware.vendor]
        found.append(Setting(mask, ",".join(map(str, gpus)), "the GPUs of this process; the only mask that is set", "launcher"))
    elif kind == "exporter" and config.hardware.vendor in MASK:
        found.append(Setting(MASK[config.hardware.vendor], "-1", "an export computes on no GPU, and leaves them to others", "launcher"))
    found += _network(config)
    if kind == "server":
        found.append(Setting("VLLM_SERVER_DEV_MODE", "1", "opens the weight-update endpoints; the server is bound to loopback", "launcher"))
    if generates(config, kind):
        found.append(Setting("VLLM_NO_USAGE_STATS", "1", "vLLM reports what it runs to its makers otherwise", "launcher"))
        if config.hardware.vendor == Vendor.none:
            found += _server_on_cpu(config)
    if (generates(config, kind) or config.topology.name == "colocate") and config.hardware.vendor == Vendor.nvidia:
        why = "flashinfer is not in our environment (vLLM looks for it on NVIDIA)"
        found.append(Setting("VLLM_USE_FLASHINFER_SAMPLER", "0", why, "launcher"))
    if kind == "trainer" and config.tracking.name == "tensorboard":
        # transformers 5 takes the directory from here; it has no argument for it.
        found.append(Setting("TENSORBOARD_LOGGING_DIR", str(run_dir / "tensorboard"), "event files stay in the run directory", "launcher"))
    return found


def generates(config: Config, kind: str) -> bool:
    """Whether vLLM runs in this process group on its own: a server, a benchmark or a tuning that starts one, or engine=vllm."""
    return kind == "server" or config.method.name in ("bench/vllm", "tune/vllm") or config.method.args.get("engine") == "vllm"


def _network(config: Config) -> list[Setting]:
    """What the ranks of several nodes talk over: asked for, never guessed."""
    slurm = config.runtime.slurm
    values = {
        # `=`: this one, and none whose name begins like it (NCCL's environment variables).
        "NCCL_SOCKET_IFNAME": (slurm.interface and f"={slurm.interface}", "runtime.slurm.interface"),
        "GLOO_SOCKET_IFNAME": (slurm.interface, "runtime.slurm.interface"),
        "NCCL_IB_HCA": (slurm.hca, "runtime.slurm.hca"),
        "NCCL_IB_GID_INDEX": (slurm.gid_index, "runtime.slurm.gid_index: the RoCE v2 address of the port"),
    }
    return [Setting(name, str(given), why, "launcher") for name, (given, why) in values.items() if given is not None]


def _server_on_cpu(config: Config) -> list[Setting]:
    values = {"VLLM_CPU_OMP_THREADS_BIND": ("nobind", "the trainers need the same few cores")}
    if not config.topology.server_cache_gb:  # the variable would win over it
        values["VLLM_CPU_KVCACHE_SPACE"] = (str(CPU_CACHE_GIB), "GiB for the cache; vLLM takes half of the memory otherwise")
    return [Setting(name, value, why, "launcher") for name, (value, why) in values.items()]


def _debug(config: Config) -> list[Setting]:
    """debug=memory_fault: slow, and the fault names its kernel. Sources: AMD's workload guide (debug agent), HIP's and PyTorch's lists."""
    if config.debug == Debug.none:
        return []
    if config.hardware.vendor == Vendor.nvidia:
        values = {
            "CUDA_LAUNCH_BLOCKING": ("1", "a fault is reported where its kernel was launched"),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is an allocation of its own, with an end that can be overrun"),
        }
    else:
        values = {
            "HSA_TOOLS_LIB": ("/opt/rocm/lib/librocm-debug-agent.so.2", "the debug agent prints the faulting wave"),
            "HSA_TOOLS_REPORT_LOAD_FAILURE": ("1", "and says so where it is not there"),
            "HSA_ENABLE_DEBUG": ("1", "the agent needs it"),
            "AMD_SERIALIZE_KERNEL": ("3", "wait before and after every kernel, so that the fault belongs to the last one"),
            "AMD_SERIALIZE_COPY": ("3", "the same for copies"),
            "PYTORCH_NO_HIP_MEMORY_CACHING": ("1", "every tensor is an allocation of its own, with an end that can be overrun"),
            "HSA_DISABLE_FRAGMENT_ALLOCATOR": ("1", "ROCr does not put several of them into one, so addresses are exact"),
        }
    return [Setting(name, value, f"debug=memory_fault: {why}", "launcher") for name, (value, why) in values.items()]


def _python_path(config: Config, host: Host) -> str:
    """recipes/; on a CPU what vLLM lacks there, for a weight transfer over gloo its plugin (recipes/smoke); then the user's own."""
    vllm = config.topology.servers > 0 or generates(config, config.method.kind)
    on_cpu = [str(ROOT / "recipes/smoke")] if config.hardware.vendor == Vendor.none and vllm else []
    gloo = [str(ROOT / "recipes/smoke/plugin")] if config.topology.servers > 0 and serving.backend(config) == "gloo" else []
    return os.pathsep.join([str(ROOT), *on_cpu, *gloo, *own_python_path(config, host)])


def own_python_path(config: Config, host: Host) -> list[str]:
    """The user's own part of it, and, only for a reward of the user's own, the directory the command was typed in.

    A shell's PYTHONPATH is for the Python of this machine: a container does not get it.
    """
    shell = None if config.runtime.on_node == "docker" else host.environ.get("PYTHONPATH")
    given = config.user_env.get("PYTHONPATH", shell)
    own_reward = any("." in name for name in config.method.rewards)
    return [*filter(None, (given or "").split(os.pathsep)), *([host.cwd] if own_reward else [])]


def _container(config: Config, host: Host) -> list[Setting]:
    """What a process needs where it has no home directory and no name, and what it would have inherited outside."""
    home = paths.home(config, host)
    found = [Setting("HOME", str(home), "the caller's uid has no home directory in the image", "launcher")]
    found += [
        Setting(name, "recipes", "the caller's uid has no name in the image; torch asks for one", "launcher")
        for name in ("USER", "LOGNAME")
    ]
    why = "the image holds no bytecode and cannot be written: compiling it anew takes 10 s of every start"
    found.append(Setting("PYTHONPYCACHEPREFIX", str(home / "pycache"), why, "launcher"))
    why = "kernels that torch.compile made stay for the next run; its own place is /tmp, which goes with the container"
    found.append(Setting("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"), why, "launcher"))
    found.append(Setting("HF_HOME", str(paths.hub_cache(host)), "your own cache of the hub", "launcher"))
    kept_out = {*INSIDE, *MASK.values(), *secret_names(config, host.environ)}
    passed = {name: value for name, value in host.environ.items() if PASSED.match(name) and name not in kept_out}
    # A path of this machine means another place inside, or none.
    return [*found, *(Setting(n, v, "set in your shell", "yours") for n, v in passed.items() if not v.startswith(("/", "~", ".")))]


def _hardware(config: Config, kind: str, num_gpus: int) -> list[Setting]:
    weights_cross = config.topology.servers > 0 and kind in ("server", "trainer") and serving.backend(config) == "nccl"
    holds = {
        When.always: True,
        When.trainer: kind == "trainer",
        When.server: generates(config, kind),
        When.multi_gpu: num_gpus * config.runtime.slurm.nodes > 1 or weights_cross,
        When.fsdp: kind == "trainer" and config.topology.strategy in ("fsdp", "zero3"),
        When.eight_gpus: num_gpus == 8,
    }
    chosen = {name: var for name, var in config.hardware.env.items() if holds[var.when]}
    return [Setting(name, v.value, f"{v.reason} [{v.source}]", "hardware") for name, v in chosen.items()]
