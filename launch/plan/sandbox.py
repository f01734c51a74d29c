"""Plan the sandbox: containers that test the code a model writes (run by sandboxed.py).

Ranks send jobs to the launcher through a Unix socket in the run directory. The launcher passes them
to a container's stdin. So a container needs no mount and cannot reach the files of ranks, and ranks
never talk to the engine.
"""

from __future__ import annotations

from pathlib import Path

from containers import images
from launch.machine.detect import Host
from launch.machine.placement import needs_sandbox
from launch.plan.container import container_name, labels
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
    limits = config.method.sandbox
    sizes = (limits.memory_gb * 1e9, limits.output_kb * 1e3, limits.disk_mb * 1e6)
    server = ["python", "/opt/recipes/server.py", f"{limits.time_s:g}"]
    argv = [*server, *(str(int(size)) for size in sizes)]
    return [Process("sandbox", "verifier", argv, [], [])] if needs_sandbox(config) else []


def specs(config: Config, host: Host, run_dir: Path) -> dict[str, ContainerSpec]:
    """Return the specification of all of the sandbox's containers; every runtime needs it."""
    limits = config.method.sandbox
    # exec lets compiled programs run
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
            stop_timeout_s=1,  # it has nothing to save
            labels=labels(run_dir, process.name, host),
            memory_gb=limits.memory_gb + SERVER_GB,
            confinement=confinement,
        )
        for process in processes(config)
    }
