"""Plan the sandbox: containers that test the code a model writes (run by sandboxed.py).

Ranks send jobs to the launcher through a Unix socket in the run directory. The launcher passes them
to a container's stdin. So a container needs no mount and cannot reach the files of ranks, and ranks
never talk to the engine.
"""

from __future__ import annotations

from pathlib import Path

from containers import images
from containers.images import LABEL
from launch.machine.detect import Host
from launch.machine.placement import needs_sandbox
from launch.plan.container import container_name
from launch.schema import Config
from launch.schema.plan import Confinement, ContainerSpec, Process

USER = "65534:65534"  # nobody
SERVER_GB = 0.1  # for server.py, in addition to a job's limit
NUM_FILES_IN_TMP = 4096
# These outlive a job's processes, so the next job could read or miss them: shared memory, message
# queues, semaphores.
SYSCTLS = {
    "kernel.shmmni": "0",
    "kernel.msgmni": "0",
    "kernel.sem": "0 0 0 0",
    "fs.mqueue.queues_max": "0",
}


def processes(config: Config) -> list[Process]:
    """Return the sandbox, which starts before all others, if the composition needs it."""
    return [Process("sandbox", "verifier", argv(config), [], [])] if needs_sandbox(config) else []


def argv(config: Config) -> list[str]:
    """Return the command of containers/sandbox/server.py with its limits."""
    limits = config.method.sandbox
    sizes = (limits.memory_gb * 1e9, limits.output_kb * 1e3, limits.disk_mb * 1e6)
    server = ["python", "/opt/recipes/server.py", f"{limits.time_s:g}"]
    return [*server, *(str(int(size)) for size in sizes)]


def specs(config: Config, host: Host, run_dir: Path) -> dict[str, ContainerSpec]:
    """Return the sandbox's container by its process's name; every runtime needs it."""
    return {p.name: _spec(config, p, host, run_dir) for p in processes(config)}


def _spec(config: Config, process: Process, host: Host, run_dir: Path) -> ContainerSpec:
    """Return the specification that all of the sandbox's containers share."""
    limits = config.method.sandbox
    # exec lets compiled programs run
    tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_mb}m,nr_inodes={NUM_FILES_IN_TMP}"
    labels = {"run": str(run_dir), "process": process.name, "uid": str(host.uid)}
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
        memory_gb=limits.memory_gb + SERVER_GB,
        memlock=False,
        security_opt=["no-new-privileges:true"],
        stop_timeout_s=1,  # it has nothing to save
        secrets=[],
        labels={f"{LABEL}.{key}": value for key, value in labels.items()},
        confinement=Confinement(
            limits.workers, limits.processes, cpus=1.0, tmpfs={"/tmp": tmpfs}, sysctls=SYSCTLS
        ),
    )
