"""Check host settings that affect every process of a run: memory, limits, disks, clock."""

from __future__ import annotations

import json
import math
import re

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.machine.sysfs import as_number, is_folder

SHM_GB = 16.0  # AMD's run lines: --shm-size 16G
SHM_ONE_GB = 1.0  # our choice: loader workers of one GPU
SHM_BREAKS_GB = 0.1  # docker's default, 64 MB, is too little for RCCL's buffers
OPEN_FILES = 65535  # vLLM raises its own soft limit to this
RUN_GB = 50.0  # a checkpoint of Qwen3-4B with AdamW in fp32: 12 bytes x 4.0e9 parameters
RUN_LEAST_GB = 0.1  # our choice: logs and metrics; a benchmark writes nothing else
# rocm/vllm of 10.8 GB compressed takes 50.4 GB on disk (containers/images.lock.yaml).
DOCKER_GB = 60.0
DOCKER_ROOT = "var/lib/docker"


def numa_balancing(facts: Facts) -> Finding | None:
    needed = facts.needs.numa_balancing
    if needed is None:
        return None
    value = as_number(facts.file("proc/sys/kernel/numa_balancing"))
    setting = f"kernel.numa_balancing={needed}"
    keep = f"to keep it: echo {setting} | sudo tee /etc/sysctl.d/60-rocm.conf"
    expected = facts.expected(setting, "host.numa_balancing")
    cure = f"sudo sysctl {setting}; {keep}"
    return expected.judge(value, value == needed, cure, "sysctl kernel.numa_balancing")


def hugepages(facts: Facts) -> Finding | None:
    needed, path = facts.needs.hugepages, "sys/kernel/mm/transparent_hugepage/enabled"
    if needed is None:
        return None
    expected = facts.expected(f"transparent hugepages: {needed}", "host.hugepages")
    match = re.search(r"\[(\w+)\]", facts.file(path) or "")
    mode = match and match[1]
    return expected.judge(mode, mode == needed, f"echo {needed} | sudo tee /{path}", f"cat /{path}")


def _limit(facts: Facts, name: str) -> float | None:
    """Return the hard limit of this process; inf if it is unlimited."""
    row = re.search(rf"^{name}\s+\S+\s+(\S+)", facts.file("proc/self/limits") or "", re.MULTILINE)
    if row and row[1] == "unlimited":
        return math.inf
    return as_number(row[1]) if row else None


def memlock(facts: Facts) -> Finding | None:
    if len(facts.gpus) < 2:
        return None
    expected = Expected(
        "unlimited", "ROCm/cvs container settings: RCCL over RDMA, and large pinned buffers"
    )
    limit = _limit(facts, "Max locked memory")
    read = "unlimited" if limit == math.inf else limit and f"{limit / 1e6:.0f} MB"
    cure = (
        'echo "* - memlock unlimited" | sudo tee /etc/security/limits.d/rocm.conf, then log '
        "in again. docker run --ulimit memlock=-1 ..."
    )
    return expected.judge(read, limit == math.inf, cure, "ulimit -Hl")


def open_files(facts: Facts) -> Finding:
    expected = Expected(
        f"{OPEN_FILES} or more",
        "vLLM raises its soft limit to that; each program sets its own soft limit",
    )
    limit = _limit(facts, "Max open files")
    cure = (
        f'echo "* hard nofile {OPEN_FILES}" | sudo tee /etc/security/limits.d/files.conf, '
        f"then log in again. docker run --ulimit nofile={OPEN_FILES} ..."
    )
    return expected.judge(limit, (limit or 0) >= OPEN_FILES, cure, "ulimit -Hn")


def shm(facts: Facts) -> Finding:
    several = len(facts.gpus) > 1
    needed = SHM_GB if several else SHM_ONE_GB
    expected = Expected(
        f"{needed:g} GB" + (" for several GPUs" if several else ""),
        "AMD's run lines (--shm-size 16G); docker gives 64 MB",
    )
    space = facts.probe.space("/dev/shm")
    read = space and f"{space.free_gb:.2f} of {space.total_gb:.2f} GB free"
    cure = (
        "docker run --ipc=host ..., or --shm-size 16g. On a host: sudo mount -o "
        "remount,size=16G /dev/shm"
    )
    if space and space.free_gb < SHM_BREAKS_GB and several:
        return expected.fail(str(read), cure)
    return expected.judge(read, bool(space and space.free_gb >= needed), cure, "df -h /dev/shm")


def run_root_disk(facts: Facts) -> Finding:
    source = "a checkpoint of a 4B model with its optimizer, 12 bytes a parameter"
    cure = "run_root=<a folder on a larger disk>, or remove old runs: du -sh runs/*/*"
    return _disk(facts, facts.run_root, RUN_GB, source, cure, least_gb=RUN_LEAST_GB)


def docker_disk(facts: Facts) -> Finding | None:
    """Check room for AMD's images. Return None if no docker engine keeps its files here."""
    try:
        folder = json.loads(facts.file("etc/docker/daemon.json") or "{}")["data-root"].lstrip("/")
    except (ValueError, TypeError, KeyError, AttributeError):  # not set
        folder = DOCKER_ROOT
    if not facts.is_amd or not is_folder(facts.root / folder):
        return None
    source = "containers/images.lock.yaml: an image takes up to 50.4 GB"
    cure = (
        'docker system df, then docker image prune; or another disk: "data-root" in '
        "/etc/docker/daemon.json"
    )
    return _disk(facts, f"/{folder}", DOCKER_GB, source, cure)


def _disk(
    facts: Facts, folder: str, needed_gb: float, source: str, cure: str, least_gb: float = 0.0
) -> Finding:
    expected, space = Expected(f"{needed_gb:g} GB free", source), facts.probe.space(folder)
    if space and space.free_gb < least_gb:
        return expected.fail(f"{space.free_gb:.1f} GB free for {folder}", cure)
    read = space and f"{space.free_gb:.0f} GB free for {folder}"
    return expected.judge(read, bool(space and space.free_gb >= needed_gb), cure, f"df -h {folder}")


def clock(facts: Facts) -> Finding:
    expected = Expected(
        "synchronized",
        "adjtimex(2); ranks on several nodes, TLS and ordered logs need the same time",
    )
    synchronized = facts.probe.clock_synchronized()
    words = {True: "synchronized", False: "not synchronized"}
    read = words.get(synchronized) if synchronized is not None else None
    return expected.judge(read, bool(synchronized), "sudo timedatectl set-ntp true", "timedatectl")
