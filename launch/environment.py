"""The environment of a process: every variable set in one place, with reason and source. A user's own value wins."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.detect import Host
from launch.errors import HostError
from launch.schema import Config, Vendor, When

# Names of variables and arguments that hold secrets. Tokens as in HF_TOKEN; not max_tokens.
SECRET = re.compile(r"(TOKEN$|SECRET|PASSWORD|API_?KEY|CREDENTIAL)", re.IGNORECASE)
ROOT = Path(__file__).parents[1]
ADDED_TO = ("PYTHONPATH",)  # where a user's own value is kept and ours put before it
MASK = {Vendor.amd: "HIP_VISIBLE_DEVICES", Vendor.nvidia: "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class Setting:
    """One variable of one process; `origin` is hardware, launcher or yours."""

    name: str
    value: str
    reason: str
    origin: str


def settings(config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path) -> list[Setting]:
    """Variables of a process of this kind on these GPUs, sorted by name."""
    chosen = {s.name: s for s in [*_launcher(config, host, kind, gpus, run_dir), *_hardware(config, kind, len(gpus))]}
    mask = MASK.get(config.hardware.vendor)
    for name in chosen:
        if name in host.environ and name != mask and name not in ADDED_TO:  # the mask is read in visible_gpus, and narrowed here
            chosen[name] = Setting(name, host.environ[name], f"set in your shell (here it would be {chosen[name].value})", "yours")
    for name, value in config.user_env.items():
        if name in ADDED_TO:
            continue
        instead = f" (here it would be {chosen[name].value})" if name in chosen else ""
        chosen[name] = Setting(name, value, f"set by user_env.{name}{instead}", "yours")
    return [chosen[name] for name in sorted(chosen)]


def leaked(node: Any, environ: dict[str, str], at: str = "") -> str | None:
    """The key of a composition that holds the value of a secret of the shell, for example by ${oc.env:HF_TOKEN}; or None."""
    secrets = {value for name, value in environ.items() if SECRET.search(name) and len(value) >= 8}
    if isinstance(node, dict):
        found = (leaked(value, environ, f"{at}.{key}" if at else str(key)) for key, value in node.items())
        return next((key for key in found if key), None)
    if isinstance(node, list):
        return next((key for key in (leaked(item, environ, at) for item in node) if key), None)
    return at if isinstance(node, str) and any(secret in node for secret in secrets) else None


def visible_gpus(config: Config, host: Host, wanted: int) -> list[int]:
    """Indices of the GPUs this run may use: those of the user's own mask, or the first `wanted`. Raises HostError."""
    mask = MASK.get(config.hardware.vendor)
    if mask is None:
        return []
    if config.hardware.vendor == Vendor.amd and "ROCR_VISIBLE_DEVICES" in host.environ:
        raise HostError(
            "ROCR_VISIBLE_DEVICES is set: with HIP_VISIBLE_DEVICES beside it ROCm miscounts (pytorch/pytorch#140398) and RCCL's "
            "weight transfer fails. Unset it and choose GPUs by HIP_VISIBLE_DEVICES."
        )
    given = host.environ.get(mask)
    if given is None:
        return list(range(wanted))
    if not all(part.strip().isdigit() for part in given.split(",")):
        raise HostError(f"{mask}={given}: indices are needed here, for example {mask}=0,1.")
    visible = [int(part) for part in given.split(",")]
    if len(set(visible)) < len(visible):
        raise HostError(f"{mask}={given}: a GPU is named twice.")
    if len(visible) < wanted:
        raise HostError(f"{mask}={given}: {len(visible)} GPUs, and this topology needs {wanted}. Widen the mask or set topology.num_gpus.")
    return visible[:wanted]


def _launcher(config: Config, host: Host, kind: str, gpus: list[int], run_dir: Path) -> list[Setting]:
    ranks = max(1, len(gpus))
    found = [
        Setting("PYTHONPATH", _python_path(config, host), "recipes/ of this repository, then your own", "launcher"),
        Setting("PYTHONSAFEPATH", "1", "a folder `recipes` where the command is typed must not hide ours", "launcher"),
        Setting("PYTHONHASHSEED", "0", "sets iterate in the same order in every run; Python reads it at start", "launcher"),
        Setting(
            "OMP_NUM_THREADS",
            str(max(1, host.num_cores // ranks)),
            f"{host.num_cores} cores over {ranks} rank(s); torchrun would set 1",
            "launcher",
        ),
    ]
    if not gpus:
        # Two cores that other work kept busy too: 2.28 s a step of the tiny model with spinning threads, 0.035 s with sleeping ones.
        why = "OpenMP's threads spin while they wait; on cores they share with others that takes the time of those they wait for"
        found.append(Setting("OMP_WAIT_POLICY", "PASSIVE", why, "launcher"))
    if gpus:
        mask = MASK[config.hardware.vendor]
        found.append(Setting(mask, ",".join(map(str, gpus)), "the GPUs of this process; the only mask that is set", "launcher"))
    if kind == "server":
        found.append(Setting("VLLM_SERVER_DEV_MODE", "1", "opens the weight-update endpoints; the server is bound to loopback", "launcher"))
        if config.hardware.vendor == Vendor.nvidia:
            why = "flashinfer is not in our environment (vLLM looks for it on NVIDIA)"
            found.append(Setting("VLLM_USE_FLASHINFER_SAMPLER", "0", why, "launcher"))
    if kind == "trainer" and config.tracking.name == "tensorboard":
        # transformers 5 takes the directory from here; it has no argument for it.
        found.append(Setting("TENSORBOARD_LOGGING_DIR", str(run_dir / "tensorboard"), "event files stay in the run directory", "launcher"))
    return found


def _python_path(config: Config, host: Host) -> str:
    """The repository, the user's path, and, only for a reward of the user's own, the directory the command was typed in."""
    given = config.user_env.get("PYTHONPATH", host.environ.get("PYTHONPATH"))
    own_reward = any("." in name for name in config.method.rewards)
    return os.pathsep.join([str(ROOT), *filter(None, [given]), *([host.cwd] if own_reward else [])])


def _hardware(config: Config, kind: str, num_gpus: int) -> list[Setting]:
    holds = {
        When.always: True,
        When.trainer: kind == "trainer",
        When.server: kind == "server",
        When.multi_gpu: num_gpus > 1,
        When.fsdp: kind == "trainer" and config.topology.strategy in ("fsdp", "zero3"),
        When.eight_gpus: num_gpus == 8,
    }
    chosen = {name: var for name, var in config.hardware.env.items() if holds[var.when]}
    return [Setting(name, v.value, f"{v.reason} [{v.source}]", "hardware") for name, v in chosen.items()]
