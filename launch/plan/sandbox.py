"""Plan the sandbox: containers that test code written by a model (launch/execution/sandboxed.py).

Ranks send jobs to the launcher through a Unix socket in the run directory, and the launcher passes
them to a container's stdin. Thus the containers need no mounts and cannot reach files of the ranks,
and the ranks need no access to the container engine.
"""

from pathlib import Path

from containers import images
from launch.machine.detect import Host
from launch.machine.placement import needs_sandbox
from launch.plan.container import container_name, labels
from launch.schema import Config
from launch.schema.plan import Confinement, ContainerSpec, Process

USER = "65534:65534"  # nobody
SERVER_GB = 0.1  # memory of server.py, in addition to a job's limit
NUM_FILES_IN_TMP = 4096
# Forbid shared memory, message queues and semaphores. They would outlive a job's processes, so the
# next job could read them.
SYSCTLS = {
    "kernel.shmmni": "0",
    "kernel.msgmni": "0",
    "kernel.sem": "0 0 0 0",
    "fs.mqueue.queues_max": "0",
}


def processes(config: Config) -> list[Process]:
    """Return the sandbox's process group, which starts first; [] if no reward runs code."""
    limits = config.method.sandbox
    sizes = (limits.memory_gb * 1e9, limits.output_kb * 1e3, limits.disk_mb * 1e6)
    server = ["python", "/opt/recipes/server.py", f"{limits.time_s:g}"]
    argv = [*server, *(str(int(size)) for size in sizes)]
    return [Process("sandbox", "verifier", argv, [], [])] if needs_sandbox(config) else []


def specs(config: Config, host: Host, run_dir: Path) -> dict[str, ContainerSpec]:
    """Return the sandbox's container by its name. Every runtime runs it in a container."""
    limits = config.method.sandbox
    # exec, so that compiled programs can run
    tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_mb}m,nr_inodes={NUM_FILES_IN_TMP}"
    confinement = Confinement(
        limits.workers, limits.processes, cpus=1.0, tmpfs={"/tmp": tmpfs}, sysctls=SYSCTLS
    )
    return {
        process.name: ContainerSpec(
            name=container_name(run_dir, process.name),
            image=images.load()["sandbox"].reference,
            command=process.argv,
            user=USER,
            stop_timeout_s=1,  # a sandbox saves nothing
            labels=labels(run_dir, process.name, host),
            memory_gb=limits.memory_gb + SERVER_GB,
            confinement=confinement,
        )
        for process in processes(config)
    }
