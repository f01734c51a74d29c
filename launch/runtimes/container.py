"""What a container is given, and why: pure functions from a composition and a process group to a frozen specification.

The specification is what plan and golden files show; `sdk_arguments` says the same in the words of the docker SDK. Everything
stands inside at the path it has outside, so that one config.yaml and one command line are right in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from containers import images
from containers.images import LABEL
from launch import environment
from launch.environment import ROOT
from launch.errors import UserError
from launch.files import samples
from launch.files.data_files import named_files
from launch.files.paths import followed, home, hub_cache, run_hash, secret_dir
from launch.machine.detect import Host
from launch.schema import Config
from launch.schema.enums import Network, Vendor
from launch.topology import Process
from launch.trainer_args import argument

SECRETS = "/run/secrets"
OVERLAY = "/opt/recipes"  # where our images hold their packages
ENTER = str(ROOT / "containers/enter.py")
FIRST_RENDER_MINOR = 128  # DRM numbers render nodes from here (include/drm/drm_file.h: DRM_MINOR_RENDER)
INFINIBAND = "/dev/infiniband"


@dataclass(frozen=True)
class Mount:
    """A path of the host at the same path inside, but for the secrets."""

    source: str
    target: str
    read_only: bool
    reason: str


@dataclass(frozen=True)
class Confinement:
    """What holds code that nobody has read: no writable file but in `tmpfs`, no process but its own as the first, gone when it ends."""

    copies: int  # containers of this kind
    pids: int  # processes and threads in each
    cpus: float
    tmpfs: dict[str, str]  # path -> mount options
    sysctls: dict[str, str]


@dataclass(frozen=True)
class ContainerSpec:
    """Everything the engine is told about one process group's container."""

    name: str
    image: str
    command: list[str]
    environment: dict[str, str]
    devices: dict[str, str]  # path -> reason
    nvidia_gpus: list[int]
    groups: list[str]  # numeric gids of the host; names only in a plan for another machine
    user: str  # uid:gid of the caller
    mounts: list[Mount]
    network: str
    ipc: str
    pid: str  # the process namespace: its own, or the server's
    shm_gb: float
    memory_gb: float | None
    memlock: bool
    security_opt: list[str]
    stop_timeout_s: int
    secrets: list[str]  # names only
    labels: dict[str, str]
    cap_add: list[str] = field(default_factory=list)  # none: the caller is no root, and could not use one
    cap_drop: list[str] = field(default_factory=lambda: ["ALL"])
    confinement: Confinement | None = None  # of the sandbox


def container_name(run_dir: Path, process: str) -> str:
    return f"rocm-recipes-{run_hash(run_dir)}-{process}"


def image_reference(config: Config) -> str:
    if config.container.name == "custom":
        return str(config.container.reference)
    return images.load()[config.container.name].reference


def specs(config: Config, processes: list[Process], host: Host, run_dir: Path) -> dict[str, ContainerSpec]:
    """A specification for each process group, by its name; empty without containers. Raises UserError."""
    if config.runtime.on_node != "docker":
        return {}
    server = next((p for p in processes if p.kind == "server"), None)
    return {p.name: _spec(config, p, server, host, run_dir, peers(p, processes)) for p in processes}


def peers(process: Process, processes: list[Process]) -> list[int]:
    """GPUs of others that this process group must see, beside its own.

    Weights go from the first training rank to every server by RCCL. On one node that is HIP IPC, which maps the other side's
    memory and needs its device: vLLM's weight transfer fails where one mask hides the other's GPU.
    """
    if process.kind == "prepare":
        return []
    if process.kind == "server":
        found = [gpu for p in processes if p.kind == "trainer" for gpu in p.gpus[:1]]
    else:
        found = [gpu for p in processes if p.kind == "server" for gpu in p.gpus]
    return [gpu for gpu in found if gpu not in process.gpus]


def _spec(config: Config, process: Process, server: Process | None, host: Host, run_dir: Path, others: list[int]) -> ContainerSpec:
    runtime, gpus = config.runtime, process.gpus
    given = devices(config, host, gpus, others)
    on_amd = "/dev/kfd" in given
    joins = server is not None and process.kind not in ("server", "prepare")
    # One network, one /dev/shm and one numbering of processes for server and trainers: RCCL and HIP IPC name their sockets and
    # segments by host and process id (ROCr: the abstract socket hsa<pid>; HIP: /hip_<pid>_<n> in /dev/shm).
    shared = f"container:{container_name(run_dir, server.name)}" if joins and server else ""
    secrets = sorted(name for name in runtime.secrets if host.environ.get(name))
    return ContainerSpec(
        name=container_name(run_dir, process.name),
        image=image_reference(config),
        command=["python3", ENTER, *process.argv],
        environment=environment_of(process, others),
        devices=given,
        nvidia_gpus=sorted({*gpus, *others}) if config.hardware.vendor == Vendor.nvidia else [],
        groups=groups(host, on_amd),
        user=f"{host.uid}:{host.gid}",
        mounts=mounts(config, host, run_dir, bool(secrets)),
        network="host" if runtime.network == Network.host else shared or (runtime.network or Network.bridge).name,
        ipc=shared or ("shareable" if process.kind == "server" else "private"),
        pid=shared or "private",
        shm_gb=runtime.shm_gb or 16.0,
        memory_gb=runtime.memory_gb,
        memlock=bool(gpus) or runtime.infiniband,
        security_opt=security(on_amd, host),
        stop_timeout_s=runtime.stop_timeout_s,
        secrets=secrets,
        labels={
            f"{LABEL}.run": str(run_dir),
            f"{LABEL}.process": process.name,
            f"{LABEL}.uid": str(host.uid),
        },
    )


def groups(host: Host, on_amd: bool) -> list[str]:
    """The caller's own, by which shared data may be readable; for a GPU those of its device nodes, and video and render.

    By number: the image's own groups of these names have others. By name only in a plan for another machine.
    """
    of_gpus = {*host.gids.values(), *(gid for gid in host.device_nodes.values() if gid is not None)} if on_amd else set()
    numbers = {*host.member_of, *of_gpus} - {host.gid}
    return [str(gid) for gid in sorted(numbers)] + (["video", "render"] if on_amd and not of_gpus else [])


def environment_of(process: Process, others: list[int]) -> dict[str, str]:
    """The process's own variables; its GPU mask renumbered, since inside only the devices that were passed are counted."""
    found = dict(process.env)
    passed = sorted({*process.gpus, *others})
    for mask in set(environment.MASK.values()) & set(found) if passed else ():
        # Its own first: HIP IPC carries the exporter's ordinal, and vLLM and torchrun count from 0.
        found[mask] = ",".join(str(passed.index(gpu)) for gpu in [*process.gpus, *others])
    return found


def devices(config: Config, host: Host, gpus: list[int], others: list[int]) -> dict[str, str]:
    """Device nodes with the reason for each: /dev/kfd, and one render node for each GPU. Never all of /dev/dri."""
    found = {}
    if config.hardware.gfx.startswith("gfx") and config.method.kind != "exporter":
        if config.smoke:  # computes on the CPU; a node that is there is passed as it would be, so that the way is tried
            gpus = environment.chosen_gpus(config, host, 1)
        wanted = {"/dev/kfd": "ROCm's compute interface"}
        wanted |= {render_node(host, gpu): f"GPU {gpu}" for gpu in gpus}
        wanted |= {render_node(host, gpu): f"GPU {gpu}: weights are sent there by HIP IPC" for gpu in others}
        found = {node: why for node, why in wanted.items() if not config.smoke or node in host.device_nodes}
    if config.runtime.infiniband:
        found[INFINIBAND] = "runtime.infiniband=true"
    return found


def render_node(host: Host, gpu: int) -> str:
    """The kernel's own number where this host has the GPU, else that of a node with GPUs of one kind."""
    minor = host.gpus[gpu].render_minor if gpu < len(host.gpus) else None
    return f"/dev/dri/renderD{FIRST_RENDER_MINOR + gpu if minor is None else minor}"


def security(on_amd: bool, host: Host) -> list[str]:
    found = ["no-new-privileges:true"]
    if on_amd:
        # AMD's documentation runs so: docker's profile blocks the NUMA calls (mbind, move_pages) that ROCm's allocators make.
        found.append("seccomp=unconfined")
    if host.selinux:  # Fedora's policy denies devices and bind mounts to container_t
        found.append("label=disable")
    return found


def mounts(config: Config, host: Host, run_dir: Path, secrets: bool) -> list[Mount]:
    """Code and data read-only; the run directory and two caches writable. Raises UserError for what cannot be a mount."""
    found = [(ROOT, True, "code"), *((Path(path), True, why) for path, why in _inputs(config, host))]
    found += [(run_dir, False, "run directory"), (home(config, host), False, "HOME: caches of compiled kernels")]
    found += [(Path(config.data.cache), False, "prepared rows")] if config.data.cache else []
    found.append((hub_cache(host), False, "models and data sets of the hub"))
    listed = [Mount(str(path), str(path), read_only, why) for path, read_only, why in found]
    if secrets:
        listed.append(Mount(str(secret_dir(host, run_dir)), SECRETS, True, "secrets"))
    for mount in listed:
        _refuse_hiding(mount, host)
    return listed  # the engine itself mounts a directory before what is inside it


def _refuse_hiding(mount: Mount, host: Host) -> None:
    """What would hide the image's own system, or show it more of the host than was meant. Raises UserError."""
    parts = Path(mount.source).parts
    if mount.target != SECRETS and (len(parts) < 3 or parts[1] in ("proc", "sys", "dev") or parts[:3] == Path(OVERLAY).parts):
        raise UserError(
            f"{mount.source} ({mount.reason}) cannot be mounted into a container: it would hide what is there. "
            "Use: a place of your own, at least two levels deep, outside /proc, /sys, /dev and /opt/recipes."
        )
    if mount.reason == "PYTHONPATH" and Path(mount.source) == Path(host.home):
        raise UserError(
            "a reward of your own under runtime=docker shows the container the directory that the command is typed in, and this is all "
            "of your home. Use: a directory with the reward in it, or user_env.PYTHONPATH=<directory> from elsewhere."
        )


def _inputs(config: Config, host: Host) -> list[tuple[str, str]]:
    given = [
        (config.data.path, "data"),
        (config.data.heldout_path, "held-out data"),
        (config.model.path, "model"),
        (config.adapter.path, "adapter"),
    ]
    given += [(path, key) for key, path in named_files(config).items()]
    if config.data.kind == "samples" and config.data.path:
        real = [Path(file) for file in samples.files(config.data.path)]
        given += [(str(file), "samples that a link leads to") for file in real if not file.is_relative_to(config.data.path)]
    if config.method.name == "sample":
        given += [(path, "method.args.reuse") for path in _with_kept(argument(config, "reuse"))]
    if config.method.name == "evaluate":
        given += [(argument(config, "lm_eval_include"), "method.args.lm_eval_include")]
    if config.method.kind == "exporter" and (converter := argument(config, "gguf_converter")):
        given += [(str(Path(converter).parent), "llama.cpp's converter, and what it imports")]
    given += [(folder, "what the model's files are links to") for folder in _link_targets(config.model.path)]
    tuned = config.user_env.get("PYTORCH_TUNABLEOP_FILENAME")
    given += [(str(Path(tuned).parent), "tuned matrix products")] if tuned else []
    given += [(folder, "PYTHONPATH") for folder in environment.own_python_path(config, host)]
    found = {path: why for path, why in given if path and Path(path) != ROOT}
    return list(found.items())


def _with_kept(pipeline: str | None) -> list[str]:
    """A pipeline's directory, and the phases that it keeps of another."""
    folders = Path(pipeline).iterdir() if pipeline and Path(pipeline).is_dir() else ()
    return [*([pipeline] if pipeline else []), *sorted(str(followed(f)) for f in folders if f.is_symlink())]


def _link_targets(model: str | None) -> list[str]:
    """Folders outside of a model's directory that hold its files: a snapshot of the hub's cache is all links."""
    folder = Path(model or "").resolve()
    links = [file.resolve().parent for file in folder.iterdir() if file.is_symlink()] if model and folder.is_dir() else []
    return sorted({str(parent) for parent in links if not parent.is_relative_to(folder)})


def as_json(spec: ContainerSpec) -> dict[str, Any]:
    """The container of a process in mode=plan format=json."""
    return {
        "name": spec.name,
        "image": spec.image,
        "command": spec.command,
        "devices": list(spec.devices),
        "device_reasons": spec.devices,
        "nvidia_gpus": spec.nvidia_gpus,
        "groups": spec.groups,
        "mounts": [vars(m) for m in spec.mounts],
        "shm_size": f"{spec.shm_gb:g}g",
        "ipc": spec.ipc,
        "pid": spec.pid,
        "network": spec.network,
        "user": spec.user,
        "memory_gb": spec.memory_gb,
        "memlock": spec.memlock,
        "security_opt": spec.security_opt,
        "cap_add": spec.cap_add,
        "cap_drop": spec.cap_drop,
        "stop_timeout_s": spec.stop_timeout_s,
        "secrets": spec.secrets,
        "labels": spec.labels,
        **({"read_only": True, **vars(spec.confinement)} if spec.confinement else {}),
    }


def sdk_arguments(spec: ContainerSpec) -> dict[str, dict[str, Any]]:
    """Keyword arguments of docker's `create_container` and `create_host_config`; plain data, so that a golden file can hold them."""
    host: dict[str, Any] = {
        "devices": [f"{node}:{node}:rw" for node in spec.devices],
        "group_add": [int(group) if group.isdigit() else group for group in spec.groups],
        "mounts": [{"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only} for m in spec.mounts],
        "network_mode": spec.network,
        "ipc_mode": spec.ipc,
        "ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}] if spec.memlock else [],
        "security_opt": spec.security_opt,
        "cap_add": spec.cap_add,
        "cap_drop": spec.cap_drop,
        "init": True,  # reaps orphans and passes signals on; a first process of its own would ignore SIGTERM
        "log_config": {"Type": "json-file", "Config": {"max-size": "64m", "max-file": "2"}},  # ours is in logs/
    }
    if spec.pid != "private":
        host["pid_mode"] = spec.pid
    if spec.ipc in ("private", "shareable"):
        host["shm_size"] = int(spec.shm_gb * 1e9)
    if spec.memory_gb is not None:
        host["mem_limit"] = host["memswap_limit"] = int(spec.memory_gb * 1e9)
    if spec.nvidia_gpus:
        ids = [str(gpu) for gpu in spec.nvidia_gpus]
        host["device_requests"] = [{"driver": "nvidia", "device_ids": ids, "capabilities": [["gpu"]]}]
    container = {
        "image": spec.image,
        "name": spec.name,
        "entrypoint": [],  # vLLM's images start a server by themselves
        "command": spec.command,
        "environment": spec.environment,
        "user": spec.user,
        "working_dir": str(ROOT),
        "detach": True,
        "labels": spec.labels,
        "stop_timeout": spec.stop_timeout_s,  # for `docker stop` and a host that shuts down; the engine's own 10 s kill a save
        "use_config_proxy": False,  # the client's proxies, passwords and all, would show in `docker inspect`
    }
    if spec.confinement:
        _confine(spec.confinement, container, host)
    return {"container": container, "host": host}


def _confine(confinement: Confinement, container: dict[str, Any], host: dict[str, Any]) -> None:
    """`detach` false: the engine closes stdin when the launcher is gone, however it ended; then the container ends, and goes."""
    container |= {"working_dir": "/tmp", "stdin_open": True, "detach": False}
    host |= {
        "init": False,  # its server is process 1, which the kernel protects from the signals of all others
        "read_only": True,
        "auto_remove": True,
        "pids_limit": confinement.pids,
        "nano_cpus": int(confinement.cpus * 1e9),
        "tmpfs": confinement.tmpfs,
        "sysctls": confinement.sysctls,
        "log_config": {"Type": "none", "Config": {}},  # verdicts are no log
    }
