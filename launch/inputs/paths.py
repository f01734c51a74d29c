"""Locate a run's files outside its run directory: caches that outlive it, and its secrets."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from launch.machine.detect import Host
from launch.schema import Config


def followed(folder: Path) -> Path:
    """Return the real location of a phase's directory.

    A kept phase is a link into another run (launch/study/phase_reuse.py).
    """
    if not folder.is_symlink():
        return folder
    return Path(os.path.normpath(folder.parent / os.readlink(folder)))


def run_hash(run_dir: Path) -> str:
    """Return a hash that names a run's containers and secret files.

    It stays the same when the run resumes.
    """
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]


def cache_dir(host: Host) -> Path:
    cache = host.environ.get("XDG_CACHE_HOME") or Path(host.home) / ".cache"
    return (Path(host.cwd) / cache).absolute()


def home(config: Config, host: Host) -> Path:
    """Return HOME of a container, one per image.

    Compiled kernels of one stack do not work with another.
    """
    return cache_dir(host) / "rocm-recipes/home" / config.container.name


def hub_cache(host: Host) -> Path:
    cache = host.environ.get("HF_HOME") or cache_dir(host) / "huggingface"
    return (Path(host.cwd) / cache).absolute()


def secret_dir(host: Host, run_dir: Path) -> Path:
    """Return a directory in memory, not on a disk: the session's own, else one in /dev/shm."""
    return secret_bases(host)[0] / run_hash(run_dir)


def secret_bases(host: Host) -> list[Path]:
    """Return where this caller's secrets may be; new ones are written to the first."""
    bases = [Path(base) for base in (host.environ.get("XDG_RUNTIME_DIR"), "/dev/shm") if base]
    return [base / f"rocm-recipes-{host.uid}" for base in bases]
