"""Compute the frozen specification of a process group's container.

Plans and golden files show it; `sdk_arguments` translates it for the docker SDK. Paths are the same
inside and outside, so that one config.yaml and one command line are right in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from containers import images
from containers.images import LABEL
from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.inputs import sample_files
from launch.inputs.jsonl_files import named_files
from launch.inputs.paths import home, hub_cache, real_folder, run_hash, secret_dir
from launch.machine import placement
from launch.machine.detect import Host
from launch.plan import process_env
from launch.plan.process_env import ROOT
from launch.schema import Config
from launch.schema.enums import Network, Vendor
from launch.schema.plan import ContainerSpec, Mount, Process
from launch.schema.trainer_args import argument

SECRETS = "/run/secrets"
OVERLAY = ("/", "opt", "recipes")  # where our images hold their packages
ENTER = str(ROOT / "containers/enter.py")
FIRST_RENDER_MINOR = 128  # of DRM's render nodes (include/drm/drm_file.h: DRM_MINOR_RENDER)
INFINIBAND = "/dev/infiniband"


def container_name(run_dir: Path, process: str) -> str:
    return f"rocm-recipes-{run_hash(run_dir)}-{process}"


def labels(run_dir: Path, process: str, host: Host) -> dict[str, str]:
    values = {"run": str(run_dir), "process": process, "uid": str(host.uid)}
    return {f"{LABEL}.{key}": value for key, value in values.items()}


def image_reference(config: Config) -> str:
    if config.container.name == "custom":
        return str(config.container.reference)
    return images.load()[config.container.name].reference


def specs(
    config: Config, processes: list[Process], host: Host, run_dir: Path
) -> dict[str, ContainerSpec]:
    """Return a specification for each process group by name; {} without containers.

    Raises UserError.
    """
    if config.runtime.on_node != "docker":
        return {}
    runtime, found = config.runtime, {}
    server = next((container_name(run_dir, p.name) for p in processes if p.kind == "server"), "")
    secrets = sorted(name for name in runtime.secrets if host.environ.get(name))
    for process in processes:
        gpus, others = process.gpus, peers(process, processes)
        nodes = devices(config, host, gpus, others)
        on_amd = "/dev/kfd" in nodes
        # Server and trainers share network, /dev/shm and process ids, because RCCL and HIP IPC name
        # sockets and segments by host and process id (ROCr: the abstract socket hsa<pid>; HIP:
        # /hip_<pid>_<n> in /dev/shm).
        joins = server and process.kind not in ("server", "prepare")
        shared = f"container:{server}" if joins else ""
        own_network = (runtime.network or Network.bridge).name
        found[process.name] = ContainerSpec(
            name=container_name(run_dir, process.name),
            image=image_reference(config),
            command=["python3", ENTER, *process.argv],
            user=f"{host.uid}:{host.gid}",
            stop_timeout_s=runtime.stop_timeout_s,
            labels=labels(run_dir, process.name, host),
            network="host" if runtime.network == Network.host else shared or own_network,
            ipc=shared or ("shareable" if process.kind == "server" else "private"),
            pid=shared or "private",
            environment=environment_of(process, others),
            devices=nodes,
            nvidia_gpus=sorted({*gpus, *others}) * (config.hardware.vendor == Vendor.nvidia),
            groups=groups(host, on_amd),
            mounts=mounts(config, host, run_dir, bool(secrets)),
            shm_gb=runtime.shm_gb or 16.0,
            memory_gb=runtime.memory_gb,
            memlock=bool(gpus) or runtime.infiniband,
            security_opt=security(on_amd, host),
            secrets=secrets,
        )
    return found


def peers(process: Process, processes: list[Process]) -> list[int]:
    """Return the GPUs of other process groups that this one must see.

    RCCL sends weights from the first training rank to every server. On one node that is HIP IPC,
    which maps the other side's memory: vLLM's weight transfer fails if a mask hides the other's
    GPU.
    """
    if process.kind == "prepare":
        return []
    if process.kind == "server":
        gpus = [gpu for p in processes if p.kind == "trainer" for gpu in p.gpus[:1]]
    else:
        gpus = [gpu for p in processes if p.kind == "server" for gpu in p.gpus]
    return [gpu for gpu in gpus if gpu not in process.gpus]


def groups(host: Host, on_amd: bool) -> list[str]:
    """Return the caller's groups and, for a GPU, video, render and those of its device nodes.

    They are numbers, because groups of these names have other numbers in the image. Only a plan for
    another machine has names.
    """
    owners = {*host.gids.values(), *host.device_nodes.values()} - {None} if on_amd else set()
    numbers = sorted(gid for gid in {*host.member_of, *owners} - {host.gid} if gid is not None)
    return [*map(str, numbers), *(["video", "render"] if on_amd and not owners else [])]


def environment_of(process: Process, others: list[int]) -> dict[str, str]:
    """Return the variables, with the GPU mask renumbered for the devices that are passed."""
    variables = dict(process.env)
    passed = sorted({*process.gpus, *others})
    for mask in set(placement.MASK.values()) & set(variables) if passed else ():
        # Its own GPUs first: HIP IPC carries the exporter's ordinal, and vLLM and torchrun count
        # from 0.
        variables[mask] = ",".join(str(passed.index(gpu)) for gpu in [*process.gpus, *others])
    return variables


def devices(config: Config, host: Host, gpus: list[int], others: list[int]) -> dict[str, str]:
    """Return /dev/kfd and a render node per GPU, never all of /dev/dri, with reasons."""
    nodes = {}
    if config.hardware.gfx.startswith("gfx") and not config.method.exports:
        if config.smoke:  # this computes on the CPU; nodes exercise the same path
            gpus = placement.chosen_gpus(config, host, 1)
        nodes = {"/dev/kfd": "ROCm's compute interface"}
        nodes |= {render_node(host, gpu): f"GPU {gpu}" for gpu in gpus}
        ipc = "the trainer sends weights by HIP IPC"
        nodes |= {render_node(host, gpu): f"GPU {gpu}: {ipc}" for gpu in others}
        if config.smoke:
            nodes = {node: why for node, why in nodes.items() if node in host.device_nodes}
    if config.runtime.infiniband:
        nodes[INFINIBAND] = "runtime.infiniband=true"
    return nodes


def render_node(host: Host, gpu: int) -> str:
    """Return this host's render node of the GPU, else that of a node of equal GPUs."""
    minor = host.gpus[gpu].render_minor if gpu < len(host.gpus) else None
    return f"/dev/dri/renderD{FIRST_RENDER_MINOR + gpu if minor is None else minor}"


def security(on_amd: bool, host: Host) -> list[str]:
    options = ["no-new-privileges:true"]
    if on_amd:
        # AMD's documentation: docker's profile blocks the NUMA calls (mbind, move_pages) of ROCm's
        # allocators.
        options.append("seccomp=unconfined")
    if host.selinux:  # Fedora's policy denies devices and bind mounts to container_t
        options.append("label=disable")
    return options


def mounts(config: Config, host: Host, run_dir: Path, secrets: bool) -> list[Mount]:
    """Mount code and data read-only, the run directory and caches writable. Raises UserError."""
    writable = {
        str(run_dir): "run directory",
        str(home(config, host)): "HOME: caches of compiled kernels",
        str(config.data.cache or ""): "prepared rows",
        str(hub_cache(host)): "models and data sets of the hub",
    }
    sources = [(str(ROOT), True, "code")]
    sources += [(str(Path(path)), True, why) for path, why in _inputs(config, host)]
    sources += [(path, False, why) for path, why in writable.items() if path]
    for path, _, why in sources:
        parts = Path(path).parts
        if len(parts) < 3 or parts[1] in ("proc", "sys", "dev") or parts[:3] == OVERLAY:
            raise UserError(
                f"{path} ({why}) cannot be mounted into a container: it would hide files of the "
                "image. Use: another directory, at least two levels deep, outside /proc, /sys, "
                "/dev and /opt/recipes."
            )
        if why == "PYTHONPATH" and Path(path) == Path(host.home):
            raise UserError(
                "method.rewards: your own reward gives the container the current directory, which "
                "is all of your home. Use: a directory with the reward in it, or "
                "user_env.PYTHONPATH=<directory> from elsewhere."
            )
    mounts = [Mount(path, path, read_only, why) for path, read_only, why in sources]
    if secrets:
        mounts.append(Mount(str(secret_dir(host, run_dir)), SECRETS, True, "secrets"))
    return mounts  # the engine itself mounts a directory before what is inside it


def _inputs(config: Config, host: Host) -> list[tuple[str, str]]:
    data, model, method = config.data, config.model, config.method
    converter, pipeline = (argument(config, name) for name in ("gguf_converter", "reuse"))
    inputs = [
        (data.path, "data"),
        (data.heldout_path, "held-out data"),
        (model.path, "model"),
        (config.adapter.path, "adapter"),
        *((path, key) for key, path in named_files(config).items()),
    ]
    if data.kind == "samples" and data.path:
        files = sample_files.files(data.path)
        linked = [file for file in files if not Path(file).is_relative_to(data.path)]
        inputs += [(file, "targets of links to samples") for file in linked]
    if pipeline:  # and the phases that it keeps from another run
        links = filter(Path.is_symlink, Path(pipeline).glob("*"))
        phases = sorted(str(real_folder(link)) for link in links)
        inputs += [(path, "method.args.reuse") for path in (pipeline, *phases)]
    inputs += [(argument(config, "lm_eval_include"), "method.args.lm_eval_include")]
    if method.exports and converter:
        inputs += [(str(Path(converter).parent), "llama.cpp's converter, and what it imports")]
    if model.path and Path(model.path).is_dir():
        # In the hub's cache, all files of a snapshot are links to another folder.
        folder = Path(model.path).resolve()
        targets = {file.resolve().parent for file in folder.iterdir() if file.is_symlink()}
        outside = sorted(str(target) for target in targets if not target.is_relative_to(folder))
        inputs += [(path, "targets of links in the model directory") for path in outside]
    if tuned := config.user_env.get("PYTORCH_TUNABLEOP_FILENAME"):
        inputs += [(str(Path(tuned).parent), "tuned matrix products")]
    inputs += [(folder, "PYTHONPATH") for folder in process_env.own_python_path(config, host)]
    return list({path: why for path, why in inputs if path and Path(path) != ROOT}.items())


def as_json(spec: ContainerSpec) -> dict[str, Any]:
    """Return the container of a process for mode=plan format=json."""
    content = plain(spec)
    for key in ("environment", "confinement", "shm_gb"):  # environment is the process's `env`
        del content[key]
    content |= {"devices": list(spec.devices), "device_reasons": spec.devices}
    content["shm_size"] = f"{spec.shm_gb:g}g"
    return content | ({"read_only": True, **plain(spec.confinement)} if spec.confinement else {})


def sdk_arguments(spec: ContainerSpec) -> dict[str, dict[str, Any]]:
    """Return arguments of docker's create_container and create_host_config, as plain data."""
    # Our own log is in logs/, so limit the engine's.
    log: dict[str, Any] = {"Type": "json-file", "Config": {"max-size": "64m", "max-file": "2"}}
    host: dict[str, Any] = {
        "devices": [f"{node}:{node}:rw" for node in spec.devices],
        "group_add": [int(group) if group.isdigit() else group for group in spec.groups],
        "mounts": [
            {"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only}
            for m in spec.mounts
        ],
        "network_mode": spec.network,
        "ipc_mode": spec.ipc,
        "ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}] if spec.memlock else [],
        "security_opt": spec.security_opt,
        "cap_add": spec.cap_add,
        "cap_drop": spec.cap_drop,
        "init": True,  # reaps orphans and forwards signals; as process 1, ours would ignore SIGTERM
        "log_config": log,
    }
    if spec.pid != "private":
        host["pid_mode"] = spec.pid
    if spec.ipc in ("private", "shareable"):
        host["shm_size"] = int(spec.shm_gb * 1e9)
    if spec.memory_gb is not None:
        host["mem_limit"] = host["memswap_limit"] = int(spec.memory_gb * 1e9)
    if spec.nvidia_gpus:
        ids = [str(gpu) for gpu in spec.nvidia_gpus]
        host["device_requests"] = [
            {"driver": "nvidia", "device_ids": ids, "capabilities": [["gpu"]]}
        ]
    container = {
        "image": spec.image,
        "name": spec.name,
        "entrypoint": [],  # vLLM's images would start a server
        "command": spec.command,
        "environment": spec.environment,
        "user": spec.user,
        "working_dir": str(ROOT),
        "detach": True,
        "labels": spec.labels,
        "stop_timeout": spec.stop_timeout_s,  # the engine's 10 s at shutdown would kill a save
        "use_config_proxy": False,  # or `docker inspect` shows the client's proxies and passwords
    }
    if spec.confinement:
        # Without `detach` stdin closes with the launcher, and the engine then ends the container.
        container |= {"working_dir": "/tmp", "stdin_open": True, "detach": False}
        host |= {
            "init": False,  # its server is process 1, which others cannot signal
            "read_only": True,
            "auto_remove": True,
            "pids_limit": spec.confinement.pids,
            "nano_cpus": int(spec.confinement.cpus * 1e9),
            "tmpfs": spec.confinement.tmpfs,
            "sysctls": spec.confinement.sysctls,
            "log_config": {"Type": "none", "Config": {}},  # its output is verdicts, not a log
        }
    return {"container": container, "host": host}
