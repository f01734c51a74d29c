"""Locate files of a run outside its directory: caches that outlive the run, and secrets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from containers import images
from launch.machine.detect import Host
from launch.schema import Config

LATEST = "latest"  # link in runs/<name> to the newest run


def pinned(path: str | Path) -> Path:
    """Return an absolute path that names a run in place of the link runs/<name>/latest.

    With the link, a record would name another run after the next command.
    """
    path = Path(path).expanduser().absolute()
    for folder in (path, *path.parents):
        if folder.name == LATEST and folder.is_symlink():
            return real_folder(folder) / path.relative_to(folder)
    return path


def python_path(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return the folders of user_env.PYTHONPATH, or else of the shell's PYTHONPATH.

    A container does not get the shell's, which is meant for this machine's Python.
    """
    shell = environ.get("PYTHONPATH") if config.runtime.on_node == "local" else None
    return [*filter(None, (config.user_env.get("PYTHONPATH", shell) or "").split(os.pathsep))]


def real_folder(folder: Path) -> Path:
    """Return the real location of a phase's directory.

    The directory of a reused phase is a link into another run (launch/study/phase_reuse.py).
    """
    if not folder.is_symlink():
        return folder
    return Path(os.path.normpath(folder.parent / os.readlink(folder)))


def run_hash(run_dir: Path) -> str:
    """Return the hash in the names of a run's containers and secret files.

    A resumed run has the same hash.
    """
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]


def cache_dir(host: Host) -> Path:
    cache = host.environ.get("XDG_CACHE_HOME") or Path(host.home) / ".cache"
    return (Path(host.cwd) / cache).absolute()


def home(config: Config, host: Host) -> Path:
    """Return HOME of the containers of an image."""
    return cache_dir(host) / "rocm-recipes/home" / image_folder(config)


def image_folder(config: Config) -> str:
    """Return the name of the folder of files that belong to an image.

    It depends on the image's contents, or on the reference of the user's own image. Kernels
    compiled for one image fail with another, and no image may write bytecode that another runs.
    """
    name, image = config.container.name, images.load().get(config.container.name)
    reference = str(config.container.reference)
    return f"{name}/{image.tag if image else hashlib.sha256(reference.encode()).hexdigest()[:12]}"


def hub_cache(host: Host) -> Path:
    cache = host.environ.get("HF_HOME") or cache_dir(host) / "huggingface"
    return (Path(host.cwd) / cache).absolute()


def secret_dir(host: Host, run_dir: Path) -> Path:
    """Return the directory of a run's secrets, which is in memory and not on a disk."""
    return secret_bases(host)[0] / run_hash(run_dir)


def secret_bases(host: Host) -> list[Path]:
    """Return the directories of this user's secrets; new secrets are written to the first."""
    bases = [Path(base) for base in (host.environ.get("XDG_RUNTIME_DIR"), "/dev/shm") if base]
    return [base / f"rocm-recipes-{host.uid}" for base in bases]
