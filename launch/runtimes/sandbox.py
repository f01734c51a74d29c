"""The sandbox: containers beside a run in which the code that its model writes is tested. Pure; launch/runtimes/sandboxed.py runs them.

The launcher is between: ranks send it jobs through a Unix socket in the run directory, and it passes them to a container's stdin. So a
container needs no mount at all, nothing that a rank reads can be reached from inside, and no rank ever talks to the engine.
"""

from __future__ import annotations

from pathlib import Path

from containers import images
from containers.images import LABEL
from launch.machine.detect import Host
from launch.runtimes.container import Confinement, ContainerSpec, container_name
from launch.schema import Config
from launch.topology import Process

USER = "65534:65534"  # nobody
SERVER_GB = 0.1  # of server.py, beside what a job may take
NUM_FILES_IN_TMP = 4096
# What one job could leave for the next, or fill, though its processes are gone: shared memory, message queues, semaphores.
SYSCTLS = {"kernel.shmmni": "0", "kernel.msgmni": "0", "kernel.sem": "0 0 0 0", "fs.mqueue.queues_max": "0"}


def needed(config: Config) -> bool:
    return "code_tests" in config.method.rewards


def processes(config: Config) -> list[Process]:
    """The sandbox, which starts before all others, where the composition needs it."""
    return [Process("sandbox", "verifier", argv(config), [], [])] if needed(config) else []


def argv(config: Config) -> list[str]:
    """containers/sandbox/server.py with its limits."""
    given = config.method.sandbox
    sizes = (given.memory_gb * 1e9, given.output_kb * 1e3, given.disk_mb * 1e6)
    return ["python", "/opt/recipes/server.py", f"{given.time_s:g}", *(str(int(size)) for size in sizes)]


def specs(config: Config, host: Host, run_dir: Path) -> dict[str, ContainerSpec]:
    """Its container under every runtime, by the name of the process."""
    return {p.name: _spec(config, p, host, run_dir) for p in processes(config)}


def _spec(config: Config, process: Process, host: Host, run_dir: Path) -> ContainerSpec:
    """Of each of its containers, all alike; the plan shows one."""
    given = config.method.sandbox
    tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={given.disk_mb}m,nr_inodes={NUM_FILES_IN_TMP}"  # exec: for what a compiler makes
    return ContainerSpec(
        name=container_name(run_dir, process.name),
        image=images.load()["sandbox"].reference,
        command=process.argv,
        environment={},
        devices={},
        nvidia_gpus=[],
        groups=[],
        user=USER,
        mounts=[],
        network="none",
        ipc="none",
        pid="private",
        shm_gb=0.0,
        memory_gb=given.memory_gb + SERVER_GB,
        memlock=False,
        security_opt=["no-new-privileges:true"],
        stop_timeout_s=1,  # it has nothing to save
        secrets=[],
        labels={f"{LABEL}.run": str(run_dir), f"{LABEL}.process": process.name, f"{LABEL}.uid": str(host.uid)},
        confinement=Confinement(given.workers, given.processes, cpus=1.0, tmpfs={"/tmp": tmpfs}, sysctls=SYSCTLS),
    )
