"""Secrets for a container: 0400 files in the caller's memory-backed directory, mounted read-only, removed when the run ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch import rundir
from launch.container import secret_dir
from launch.detect import Host
from launch.errors import HostError

OWNER = ".run"  # in each directory: the run directory whose lock says whether the secrets are still needed


@contextmanager
def written(names: list[str], host: Host, run_dir: Path) -> Iterator[None]:
    """The named variables of the shell as files, for as long as the run lasts. Raises HostError."""
    folder = secret_dir(host, run_dir)
    if names:
        _write(names, host, run_dir, folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(names: list[str], host: Host, run_dir: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        if folder.parent.stat().st_uid != host.uid:
            raise HostError(
                f"{folder.parent} belongs to somebody else, and secrets would be written there. Remove it, or set XDG_RUNTIME_DIR."
            )
        folder.parent.chmod(0o700)
        folder.mkdir(mode=0o700)
        _write_file(folder / OWNER, str(run_dir))
        for name in names:
            _write_file(folder / name, host.environ[name])
    except OSError as error:
        raise HostError(f"{folder}: secrets cannot be written there ({error.strerror}). XDG_RUNTIME_DIR names another place.") from error


def _write_file(path: Path, content: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w", encoding="utf-8") as file:
        file.write(content)


def remove_orphans(host: Host) -> None:
    """Secrets of launchers that were killed before they could remove them."""
    for folder in sorted(secret_dir(host, Path()).parent.glob("*")):
        owner = folder / OWNER
        if not owner.is_file() or not rundir.is_locked(Path(owner.read_text(encoding="utf-8"))):
            shutil.rmtree(folder, ignore_errors=True)
