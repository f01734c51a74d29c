"""Check host settings that affect every process of a run: memory, limits, disks, clock."""

from __future__ import annotations

import json
import math
import re

from containers import images
from launch.checks.facts import RUN_MIN_GB, Facts
from launch.checks.finding import Finding, fail, judge, passed, warn
from launch.machine.container_engine import groups_remedy, init_remedy
from launch.machine.sysfs import as_number, is_folder

SHM_GB = 16.0  # AMD's docker commands: --shm-size 16G
SHM_ONE_GB = 1.0  # our choice, for the data loader workers of one GPU
SHM_BREAKS_GB = 0.1  # docker's default, 64 MB, is too little for RCCL's buffers
OPEN_FILES = 65535  # vLLM raises its soft limit to this
DOCKER_ROOT = "var/lib/docker"


def numa_balancing(facts: Facts) -> Finding:
    needed = facts.needs.numa_balancing
    value = as_number(facts.file("proc/sys/kernel/numa_balancing"))
    setting = f"kernel.numa_balancing={needed}"
    keep = f"to keep this after a reboot: echo {setting} | sudo tee /etc/sysctl.d/60-rocm.conf"
    remedy = f"sudo sysctl {setting}; {keep}"
    return judge(value, value == needed, remedy, "sysctl kernel.numa_balancing")


def hugepages(facts: Facts) -> Finding:
    needed, path = facts.needs.hugepages, "sys/kernel/mm/transparent_hugepage/enabled"
    match = re.search(r"\[(\w+)\]", facts.file(path) or "")
    mode = match and match[1]
    return judge(mode, mode == needed, f"echo {needed} | sudo tee /{path}", f"cat /{path}")


def _limit(facts: Facts, name: str) -> float | None:
    """Return a hard limit of this process; inf if unlimited, None if unknown."""
    row = re.search(rf"^{name}\s+\S+\s+(\S+)", facts.file("proc/self/limits") or "", re.MULTILINE)
    if row and row[1] == "unlimited":
        return math.inf
    return as_number(row[1]) if row else None


def memlock(facts: Facts) -> Finding | None:
    if len(facts.gpus) < 2:
        return None
    limit = _limit(facts, "Max locked memory")
    reading = "unlimited" if limit == math.inf else limit and f"{limit / 1e6:.0f} MB"
    on_host = 'echo "* - memlock unlimited" | sudo tee /etc/security/limits.d/rocm.conf, then log '
    remedy = facts.start_with("--ulimit memlock=-1", on_host + "in again")
    return judge(reading, limit == math.inf, remedy, "ulimit -Hl")


def open_files(facts: Facts) -> Finding:
    limit = _limit(facts, "Max open files")
    on_host = f'echo "* hard nofile {OPEN_FILES}" | sudo tee /etc/security/limits.d/files.conf, '
    remedy = facts.start_with(f"--ulimit nofile={OPEN_FILES}", on_host + "then log in again")
    return judge(limit, (limit or 0) >= OPEN_FILES, remedy, "ulimit -Hn")


def shm(facts: Facts) -> Finding:
    several = len(facts.gpus) > 1
    needed = SHM_GB if several else SHM_ONE_GB
    space = facts.probe.space("/dev/shm")
    reading = space and f"{space.free_gb:.2f} of {space.total_gb:.2f} GB free"
    remount = "sudo mount -o remount,size=16G /dev/shm"
    remedy = facts.start_with("--shm-size 16g (or --ipc=host)", remount)
    if facts.in_container:
        remedy += f"; as a privileged root: {remount.removeprefix('sudo ')}"
    finding = judge(reading, bool(space and space.free_gb >= needed), remedy, "df -h /dev/shm")
    if space and space.free_gb < SHM_BREAKS_GB and several:
        finding = fail(str(reading), remedy)
    return finding.expecting(f"{needed:g} GB" + (" for several GPUs" if several else ""))


def run_root_disk(facts: Facts) -> Finding:
    remedy = "set run_root=<a folder on a larger disk>, or remove old runs: du -sh runs/*/*"
    return _disk(facts, facts.run_root, facts.run_gb, remedy, min_gb=RUN_MIN_GB)


def engine(facts: Facts) -> Finding | None:
    """Check that containers start and may open the GPUs. Return None if no engine answers."""
    found = facts.probe.engine(facts.host.environ)
    if found is None:
        return None
    if remedy := init_remedy(found, facts.host):
        return warn(f"{found}, with no init for containers in its usual folders", remedy)
    if remedy := groups_remedy(found, facts.host):
        return warn(f"{found}, which does not pass your groups to containers", remedy)
    return passed(str(found))


def docker_disk(facts: Facts) -> Finding | None:
    """Check disk space for the image. Return None without an image or docker's folder."""
    image = facts.image
    try:
        folder = json.loads(facts.file("etc/docker/daemon.json") or "{}")["data-root"].lstrip("/")
    except (ValueError, TypeError, KeyError, AttributeError):  # missing or malformed
        folder = DOCKER_ROOT
    if image is None or not is_folder(facts.root / folder):
        return None
    has_image = facts.probe.image_gb(image.reference, facts.host.environ)
    needed_gb = 0.0 if has_image else image.needed_gb
    finding = _disk(facts, f"/{folder}", needed_gb, images.SPACE_REMEDY)
    return finding.expecting(f"{needed_gb:.0f} GB free for {image.reference}")


def _disk(facts: Facts, folder: str, needed_gb: float, remedy: str, min_gb: float = 0.0) -> Finding:
    space = facts.probe.space(folder)
    if space and space.free_gb < min_gb:
        return fail(f"{space.free_gb:.1f} GB free for {folder}", remedy)
    reading = space and f"{space.free_gb:.0f} GB free for {folder}"
    return judge(reading, bool(space and space.free_gb >= needed_gb), remedy, f"df -h {folder}")


def clock(facts: Facts) -> Finding:
    synchronized = facts.probe.clock_synchronized()
    words = {True: "synchronized", False: "not synchronized"}
    reading = words.get(synchronized) if synchronized is not None else None
    return judge(reading, bool(synchronized), "sudo timedatectl set-ntp true", "timedatectl")
