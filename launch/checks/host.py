"""Settings of the host that every process of a run meets: memory, limits, disks, clock."""

from __future__ import annotations

import json
import re

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.machine.sysfs import as_number, is_folder

SHM_GB = 16.0  # AMD's run lines: --shm-size 16G
SHM_ONE_GB = 1.0  # our choice: loader workers of one GPU
SHM_BREAKS_GB = 0.1  # docker's default, 64 MB, is too little for RCCL's buffers
OPEN_FILES = 65535  # vLLM raises its own soft limit to this
RUN_GB = 50.0  # a checkpoint of Qwen3-4B with AdamW in fp32: 12 bytes x 4.0e9 parameters
RUN_LEAST_GB = 0.1  # our choice: logs and metrics; a benchmark leaves nothing else
DOCKER_GB = 60.0  # rocm/vllm of 10.8 GB compressed takes 50.4 GB on disk (containers/images.lock.yaml)
DOCKER_ROOT = "var/lib/docker"


def numa_balancing(facts: Facts) -> Finding | None:
    if facts.needs.numa_balancing is None:
        return None
    expected = Expected(f"kernel.numa_balancing={facts.needs.numa_balancing}", f"conf/hardware: host.numa_balancing of {facts.group}")
    found = as_number(facts.file("proc/sys/kernel/numa_balancing"))
    if found is None:
        return expected.unknown("/proc/sys/kernel/numa_balancing is not there", "sysctl kernel.numa_balancing")
    if found == facts.needs.numa_balancing:
        return expected.passed(str(found))
    setting = f"kernel.numa_balancing={facts.needs.numa_balancing}"
    return expected.warn(str(found), f"sudo sysctl {setting}; to keep it: echo {setting} | sudo tee /etc/sysctl.d/60-rocm.conf")


def hugepages(facts: Facts) -> Finding | None:
    if facts.needs.hugepages is None:
        return None
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    expected = Expected(f"transparent hugepages: {facts.needs.hugepages}", f"conf/hardware: host.hugepages of {facts.group}")
    found = re.search(r"\[(\w+)\]", facts.file(path) or "")
    if found is None:
        return expected.unknown(f"/{path} is not there", f"cat /{path}")
    if found.group(1) == facts.needs.hugepages:
        return expected.passed(found.group(1))
    return expected.warn(found.group(1), f"echo {facts.needs.hugepages} | sudo tee /{path}")


def _limit(facts: Facts, name: str) -> float | None:
    """The hard limit of this process; inf where there is none."""
    row = re.search(rf"^{name}\s+\S+\s+(\S+)", facts.file("proc/self/limits") or "", re.MULTILINE)
    found = as_number(row.group(1)) if row and row.group(1) != "unlimited" else None
    return float("inf") if row and row.group(1) == "unlimited" else found


def memlock(facts: Facts) -> Finding | None:
    if len(facts.gpus) < 2:
        return None
    expected = Expected("unlimited", "ROCm/cvs container settings: RCCL over RDMA, and large pinned buffers")
    found = _limit(facts, "Max locked memory")
    if found is None:
        return expected.unknown("/proc/self/limits does not say", "ulimit -Hl")
    if found == float("inf"):
        return expected.passed("unlimited")
    cure = 'echo "* - memlock unlimited" | sudo tee /etc/security/limits.d/rocm.conf, then log in again. docker run --ulimit memlock=-1 ...'
    return expected.warn(f"{found / 1e6:.0f} MB", cure)


def open_files(facts: Facts) -> Finding:
    expected = Expected(f"{OPEN_FILES} or more", "vLLM raises its soft limit to that; a soft limit is each program's own affair")
    found = _limit(facts, "Max open files")
    if found is None:
        return expected.unknown("/proc/self/limits does not say", "ulimit -Hn")
    if found >= OPEN_FILES:
        return expected.passed(f"{found:.0f}")
    cure = f'echo "* hard nofile {OPEN_FILES}" | sudo tee /etc/security/limits.d/files.conf, then log in again'
    return expected.warn(f"{found:.0f}", f"{cure}. docker run --ulimit nofile={OPEN_FILES} ...")


def shm(facts: Facts) -> Finding:
    several = len(facts.gpus) > 1
    wanted = SHM_GB if several else SHM_ONE_GB
    expected = Expected(f"{wanted:g} GB" + (" for several GPUs" if several else ""), "AMD's run lines (--shm-size 16G); docker gives 64 MB")
    found = facts.probe.space("/dev/shm")
    if found is None:
        return expected.unknown("cannot be measured here", "df -h /dev/shm")
    read = f"{found.free_gb:.2f} of {found.total_gb:.2f} GB free"
    cure = "docker run --ipc=host ..., or --shm-size 16g. On a host: sudo mount -o remount,size=16G /dev/shm"
    if found.free_gb < SHM_BREAKS_GB and several:
        return expected.fail(read, cure)
    return expected.passed(read) if found.free_gb >= wanted else expected.warn(read, cure)


def run_root_disk(facts: Facts) -> Finding:
    expected = Expected(f"{RUN_GB:g} GB free", "a checkpoint of a 4B model with its optimizer, 12 bytes a parameter")
    found = facts.probe.space(facts.run_root)
    if found is None:
        return expected.unknown("cannot be measured here", f"df -h {facts.run_root}")
    read = f"{found.free_gb:.0f} GB free for {facts.run_root}"
    cure = "run_root=<a folder on a larger disk>, or remove runs that are done with: du -sh runs/*/*"
    if found.free_gb < RUN_LEAST_GB:
        return expected.fail(f"{found.free_gb:.1f} GB free for {facts.run_root}", cure)
    return expected.passed(read) if found.free_gb >= RUN_GB else expected.warn(read, cure)


def docker_disk(facts: Facts) -> Finding | None:
    """The images of AMD's GPUs. None where no docker engine keeps its files here."""
    if not facts.is_amd:
        return None
    folder = _docker_root(facts)
    if not is_folder(facts.root / folder.lstrip("/")):
        return None
    expected = Expected(f"{DOCKER_GB:g} GB free", "containers/images.lock.yaml: an image takes up to 50.4 GB")
    found = facts.probe.space(folder)
    if found is None:
        return expected.unknown("cannot be measured here", f"df -h {folder}")
    read = f"{found.free_gb:.0f} GB free for {folder}"
    cure = 'docker system df, then docker image prune; or another disk: "data-root" in /etc/docker/daemon.json'
    return expected.passed(read) if found.free_gb >= DOCKER_GB else expected.warn(read, cure)


def _docker_root(facts: Facts) -> str:
    try:
        given = json.loads(facts.file("etc/docker/daemon.json") or "{}")
    except ValueError:
        given = {}
    root = given.get("data-root") if isinstance(given, dict) else None
    return root if isinstance(root, str) else f"/{DOCKER_ROOT}"


def clock(facts: Facts) -> Finding:
    expected = Expected("synchronized", "adjtimex(2); ranks of several nodes, TLS and the order of logs need one time")
    found = facts.probe.clock_synchronized()
    if found is None:
        return expected.unknown("the kernel's clock state cannot be asked here", "timedatectl")
    return expected.passed("synchronized") if found else expected.warn("not synchronized", "sudo timedatectl set-ntp true")
