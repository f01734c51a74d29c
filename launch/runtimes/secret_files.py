"""Secrets for a container: 0400 files in the caller's memory-backed directory, mounted read-only, removed when the run ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from launch.errors import HostError
from launch.files import rundir
from launch.files.paths import secret_bases, secret_dir
from launch.machine.detect import Host

OWNER = ".run"  # in each directory: the run directory whose lock says whether the secrets are still needed
NAME = re.compile(r"[0-9a-f]{12}")  # of a run's folder


@contextlib.contextmanager
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
    try:
        with contextlib.suppress(FileExistsError):
            folder.parent.mkdir(mode=0o700)
        if not _is_mine(folder.parent, host):
            raise HostError(
                f"{folder.parent} is not a directory that only you can open, and secrets would be written there. "
                "Remove it, or set XDG_RUNTIME_DIR to a directory of yours."
            )
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
        folder.mkdir(mode=0o700)
        _write_file(folder / OWNER, str(run_dir))
        for name in names:
            _write_file(folder / name, host.environ[name])
    except OSError as error:
        raise HostError(f"{folder}: secrets cannot be written there ({error.strerror}). XDG_RUNTIME_DIR names another place.") from error


def _is_mine(folder: Path, host: Host) -> bool:
    """A real directory, not a link that somebody else has put there, closed to everybody else."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == host.uid and not found.st_mode & 0o077


def _write_file(path: Path, content: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
        file.write(os.fsencode(content))  # whatever bytes the shell had


def remove_orphans(host: Host) -> None:
    """Secrets of launchers that were killed before they could remove them."""
    for base in secret_bases(host):
        if not base.exists() or not _is_mine(base, host):
            continue
        for folder in sorted(f for f in base.iterdir() if NAME.fullmatch(f.name) and not f.is_symlink()):
            try:
                run_dir = (folder / OWNER).read_text(encoding="utf-8")
            except FileNotFoundError:  # another launcher makes or removes it at this moment; it holds no secret yet
                continue
            if run_dir and not rundir.is_locked(Path(run_dir)):
                shutil.rmtree(folder, ignore_errors=True)
