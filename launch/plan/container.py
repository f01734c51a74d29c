"""Compute the specification of each process group's container, without starting it.

`sdk_arguments` translates a specification for the docker SDK. Paths are the same inside and outside
a container, so the same config.yaml and command line work in both.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from containers import images
from containers.images import LABEL
from launch.core.json_files import plain
from launch.inputs.paths import run_hash
from launch.machine import placement
from launch.machine.detect import Host
from launch.plan import container_argv, inherited
from launch.plan.mounts import mounts
from launch.plan.process_env import ROOT
from launch.schema import Config
from launch.schema.enums import Network, Vendor
from launch.schema.plan import ContainerSpec, Process
from launch.schema.trainer_args import value_or_none

PAUSE = "pause"  # process group whose container owns what a server and its trainers share
ENTER = str(ROOT / "containers/enter.py")
FIRST_RENDER_MINOR = 128  # of DRM's render nodes (include/drm/drm_file.h: DRM_MINOR_RENDER)
INFINIBAND = "/dev/infiniband"
# Limits of a container's processes; -1 means none. RDMA and large pinned buffers need memlock
# (ROCm/cvs). vLLM raises its limit of files to this number. NVIDIA recommends the stack.
LIMITS = {"memlock": -1, "nofile": 65535, "stack": 2**26}
# The kernel's maximum. podman's default of 2048 is too few threads for eight ranks.
MAX_PIDS = 2**22


def container_name(run_dir: Path, process: str) -> str:
    return f"rocm-recipes-{run_hash(run_dir)}-{process}"


def labels(run_dir: Path, process: str, host: Host) -> dict[str, str]:
    """Return the labels that identify the launcher's containers."""
    values = {"run": str(run_dir), "process": process, "uid": str(host.uid)}
    return {f"{LABEL}.{key}": value for key, value in values.items()}


def image_reference(config: Config) -> str:
    """Return the image that the run starts, by tag or digest."""
    if config.container.name == "custom":
        return str(config.container.reference)
    return images.load()[config.container.name].reference


def specs(
    config: Config, processes: list[Process], host: Host, run_dir: Path
) -> dict[str, ContainerSpec]:
    """Return the container of each process group by its name; {} if the runtime uses none.

    Raises UserError for a path that cannot be mounted.
    """
    if not config.runtime.in_container:
        return {}
    containers = {}
    is_on_one_node = config.runtime.on_node == "docker" and config.runtime.slurm.nodes == 1
    if is_on_one_node and any(process.kind == "server" for process in processes):
        containers[PAUSE] = pause(config, host, run_dir)
    runtime, secrets = config.runtime, inherited.secret_files(config, host.environ)
    network = (runtime.network or Network.bridge).name
    for process in processes:
        gpus, peers = process.gpus, peer_gpus(process, processes)
        nodes = devices(config, host, gpus, peers)
        on_amd = "/dev/kfd" in nodes
        is_joined = PAUSE in containers and process.kind != "prepare"
        shared = f"container:{containers[PAUSE].name}" if is_joined else ""
        on_host = runtime.network == Network.host or runtime.slurm.nodes > 1
        # without an engine, a container shares the host's namespaces and devices
        spec = ContainerSpec(
            name=container_name(run_dir, process.name),
            image=image_reference(config),
            command=["python3", ENTER, *process.argv],
            user=f"{host.uid}:{host.gid}",
            stop_timeout_s=runtime.stop_timeout_s,
            labels=labels(run_dir, process.name, host),
            network="host",
            ipc="host",
            pid="host",
            environment=process.env,
            mounts=mounts(config, host, run_dir, bool(secrets) and runtime.on_node != "pyxis"),
            shm_gb=runtime.shm_gb or 16.0,
            memory_gb=runtime.memory_gb,
            security_opt=[],
            secrets=secrets,
        )
        if runtime.on_node != "docker":
            prefix = container_argv.prefix(config, host, spec, process)
            containers[process.name] = dataclasses.replace(spec, prefix=prefix)
            continue
        containers[process.name] = dataclasses.replace(
            spec,
            network="host" if on_host else shared or network,
            ipc=shared or "private",
            pid=shared or "private",
            environment=container_environment(process, peers),
            devices=nodes,
            nvidia_gpus=sorted({*gpus, *peers}) * (config.hardware.vendor == Vendor.nvidia),
            groups=groups(host, on_amd),
            memlock=bool(gpus) or runtime.infiniband,
            security_opt=security(on_amd, host),
            ports=published_ports(config),
        )
    return containers


def pause(config: Config, host: Host, run_dir: Path) -> ContainerSpec:
    """Return the container that owns the network, /dev/shm and process ids of a split.

    The server and the trainers share them, because RCCL and HIP IPC build the names of sockets and
    segments from host and process id (ROCr: the abstract socket hsa<pid>; HIP: /hip_<pid>_<n> in
    /dev/shm). They outlive the server, so that trainers can save after it has failed.
    """
    return ContainerSpec(
        name=container_name(run_dir, PAUSE),
        image=image_reference(config),
        command=["sleep", "infinity"],
        user=f"{host.uid}:{host.gid}",
        stop_timeout_s=1,
        labels=labels(run_dir, PAUSE, host),
        network=(config.runtime.network or Network.bridge).name,
        ipc="shareable",
        shm_gb=config.runtime.shm_gb or 16.0,
        security_opt=security(False, host),
    )


def pause_process(containers: dict[str, ContainerSpec]) -> list[Process]:
    """Return the process group of the pause container, which starts first; [] without one."""
    spec = containers.get(PAUSE)
    return [Process(PAUSE, "pause", spec.command, [], [])] if spec else []


def published_ports(config: Config) -> dict[int, str]:
    """Return the port of method=serve and its address on the host."""
    if config.method.kind != "service" or config.runtime.network == Network.host:
        return {}
    host, port = (value_or_none(config, name) for name in ("host", "port"))
    return {int(port): str(host)}


def peer_gpus(process: Process, processes: list[Process]) -> list[int]:
    """Return the GPUs of other process groups that this one must see.

    The first training rank sends its weights to every server. Within a node, RCCL uses HIP IPC,
    which maps the other process's memory, so the transfer fails if a mask hides the other GPU.
    """
    processes = [p for p in processes if p.node == process.node]
    if process.kind == "prepare":
        return []
    if process.kind == "server":
        gpus = [gpu for p in processes if p.kind == "trainer" for gpu in p.gpus[:1]]
    else:
        gpus = [gpu for p in processes if p.kind == "server" for gpu in p.gpus]
    return [gpu for gpu in gpus if gpu not in process.gpus]


def groups(host: Host, on_amd: bool) -> list[str]:
    """Return the caller's groups and, for an AMD GPU, the groups that may open device nodes.

    Return gids, because the groups video and render have other gids in the image. A machine that
    has neither group can still plan, with the names.
    """
    owners = {*host.gids.values(), *host.device_nodes.values()} - {None} if on_amd else set()
    gids = sorted(gid for gid in {*host.member_of, *owners} - {host.gid} if gid is not None)
    return [*map(str, gids), *(["video", "render"] if on_amd and not owners else [])]


def container_environment(process: Process, peers: list[int]) -> dict[str, str]:
    """Return a process's variables, with its GPU mask renumbered for the container's devices."""
    variables = dict(process.env)
    # The process's GPUs come first, because vLLM and torchrun use indices from 0. The peers'
    # GPUs follow, because HIP IPC refers to the exporter's GPU by index.
    gpus = [*process.gpus, *peers]
    indices = {gpu: str(index) for index, gpu in enumerate(sorted(set(gpus)))}
    for mask in set(placement.MASK.values()) & set(variables) if gpus else ():
        variables[mask] = ",".join(indices[gpu] for gpu in gpus)
    return variables


def devices(config: Config, host: Host, gpus: list[int], peers: list[int]) -> dict[str, str]:
    """Return the device nodes that the container gets, each with the reason.

    A GPU needs /dev/kfd and its render node. The rest of /dev/dri is not passed.
    """
    nodes = {}
    if config.hardware.gfx.startswith("gfx") and not config.method.exports:
        if config.smoke:  # pass a GPU, as the real run does, although the CPU computes
            gpus = placement.chosen_gpus(config, host, 1)
        nodes = {"/dev/kfd": "ROCm's compute interface"}
        nodes |= {render_node(host, gpu): f"GPU {gpu}" for gpu in gpus}
        ipc = "the trainer sends weights by HIP IPC"
        nodes |= {render_node(host, gpu): f"GPU {gpu}: {ipc}" for gpu in peers}
        if config.smoke:  # it computes on the CPU, so it needs no permission for GPUs
            usable = {
                node
                for node, gid in host.device_nodes.items()
                if gid is None or host.uid == 0 or gid in host.member_of
            }
            nodes = {node: reason for node, reason in nodes.items() if node in usable}
            nodes = nodes if "/dev/kfd" in nodes else {}
    if config.runtime.infiniband:
        nodes[INFINIBAND] = "runtime.infiniband=true"
    return nodes


def render_node(host: Host, gpu: int) -> str:
    """Return the GPU's render node on this host, or its usual node on another host."""
    minor = host.gpus[gpu].render_minor if gpu < len(host.gpus) else None
    return f"/dev/dri/renderD{FIRST_RENDER_MINOR + gpu if minor is None else minor}"


def security(on_amd: bool, host: Host) -> list[str]:
    options = ["no-new-privileges:true"]
    if on_amd:
        # Docker's default profile blocks the NUMA calls (mbind, move_pages) of ROCm's allocators
        # (AMD's documentation).
        options.append("seccomp=unconfined")
    if host.selinux:  # Fedora's policy denies devices and bind mounts to container_t
        options.append("label=disable")
    return options


def as_json(spec: ContainerSpec) -> dict[str, Any]:
    """Return a container as an object of mode=plan format=json."""
    content = plain(spec)
    # The process's `env` has the environment. The launcher's terminal decides stdin and tty.
    for key in ("environment", "confinement", "shm_gb", "stdin", "tty"):
        del content[key]
    for key in ("ports", "prefix"):
        if not content[key]:
            del content[key]
    content |= {"devices": list(spec.devices), "device_reasons": spec.devices}
    content["shm_size"] = f"{spec.shm_gb:g}g"
    return content | ({"read_only": True, **plain(spec.confinement)} if spec.confinement else {})


def ulimits(spec: ContainerSpec, highest: Mapping[str, int]) -> dict[str, int]:
    """Return the limits of a container's processes, none above those in `highest`."""
    limits = {}
    for name, value in LIMITS.items() if spec.confinement is None else ():
        if name != "memlock" or spec.memlock:
            bounds = {value, highest.get(name, -1)} - {-1}
            limits[name] = min(bounds, default=-1)
    return limits


def sdk_arguments(
    spec: ContainerSpec, highest: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of the SDK's create_container and create_host_config.

    `highest` has the largest limits of processes that the engine may set; None: any.
    """
    # The launcher copies the output to logs/, so the engine need not keep all of it.
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
        "ulimits": [
            {"Name": name, "Soft": value, "Hard": value}
            for name, value in ulimits(spec, highest or {}).items()
        ],
        "security_opt": spec.security_opt,
        "cap_add": spec.cap_add,
        "cap_drop": spec.cap_drop,
        "pids_limit": MAX_PIDS,
        # tini reaps orphans and forwards SIGTERM, which a PID 1 ignores. podman rejects it in a
        # container that joins another's process ids, whose PID 1 reaps its orphans.
        "init": spec.pid == "private",
        "log_config": log,
    }
    if spec.pid != "private":
        host["pid_mode"] = spec.pid
    if spec.ports:
        host["port_bindings"] = {port: (address, port) for port, address in spec.ports.items()}
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
        "entrypoint": [],  # the entrypoint of vLLM's images would start a server
        "command": spec.command,
        "environment": spec.environment,
        "user": spec.user,
        "working_dir": str(ROOT) if spec.mounts else "/",
        "detach": True,
        "labels": spec.labels,
        "stop_timeout": spec.stop_timeout_s,  # the engine's default of 10 s would interrupt a save
        "use_config_proxy": False,  # `docker inspect` would show the proxies' passwords
    }
    if spec.ports:
        container["ports"] = [*spec.ports]
    if spec.stdin:
        container |= {"tty": spec.tty, "stdin_open": True, "detach": False}
    if spec.confinement:
        # An attached container exits with the launcher, because its stdin closes.
        container |= {"working_dir": "/tmp", "stdin_open": True, "detach": False}
        host |= {
            "init": False,  # the sandbox's server must be PID 1, which jobs cannot signal
            "read_only": True,
            "auto_remove": True,
            "pids_limit": spec.confinement.pids,
            "nano_cpus": int(spec.confinement.cpus * 1e9),
            "tmpfs": spec.confinement.tmpfs,
            "sysctls": spec.confinement.sysctls,
            "log_config": {"Type": "none", "Config": {}},  # the output is verdicts, not a log
        }
    return {"container": container, "host": host}
