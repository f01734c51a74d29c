"""Where the files of a run lie on the host beside its run directory: caches that outlive it, and its secrets."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from launch.machine.detect import Host
from launch.schema import Config


def followed(folder: Path) -> Path:
    """Where a phase's directory really lies: the link of one that is kept leads into another run (launch/pipelines/keeping.py)."""
    return Path(os.path.normpath(folder.parent / os.readlink(folder))) if folder.is_symlink() else folder


def run_hash(run_dir: Path) -> str:
    """Names containers and secret files of a run: the same again when it is resumed."""
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]


def cache_dir(host: Host) -> Path:
    return (Path(host.cwd) / (host.environ.get("XDG_CACHE_HOME") or Path(host.home) / ".cache")).absolute()


def home(config: Config, host: Host) -> Path:
    """HOME of a container; one for each image: kernels compiled by one stack are not another's."""
    return cache_dir(host) / "rocm-recipes/home" / config.container.name


def hub_cache(host: Host) -> Path:
    return (Path(host.cwd) / (host.environ.get("HF_HOME") or cache_dir(host) / "huggingface")).absolute()


def secret_dir(host: Host, run_dir: Path) -> Path:
    """In memory, not on a disk: the session's own directory, or /dev/shm where there is none."""
    return secret_bases(host)[0] / run_hash(run_dir)


def secret_bases(host: Host) -> list[Path]:
    """Where secrets of this caller may stand: the first is where they are written today."""
    bases = [Path(base) for base in (host.environ.get("XDG_RUNTIME_DIR"), "/dev/shm") if base]
    return [base / f"rocm-recipes-{host.uid}" for base in bases]
