"""Keep a container's secrets as files of mode 0400 in the caller's memory-backed directory.

They are mounted read-only and removed when the run ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from launch.core.errors import HostError
from launch.inputs.paths import secret_bases, secret_dir
from launch.machine.detect import Host
from launch.plan import rundir

# In each folder, names the run directory whose lock shows whether the secrets are still needed.
OWNER = ".run"
NAME = re.compile(r"[0-9a-f]{12}")


@contextlib.contextmanager
def written(names: list[str], host: Host, run_dir: Path) -> Iterator[None]:
    """Keep the named variables of the shell as files while the run lasts.

    Raises HostError and OSError.
    """
    folder = secret_dir(host, run_dir)
    if names:
        with contextlib.suppress(FileExistsError):
            folder.parent.mkdir(mode=0o700)
        if not _is_mine(folder.parent, host):
            raise HostError(
                f"{folder.parent} must be a directory that only you can open, because secrets are "
                "written there. Remove it, or set XDG_RUNTIME_DIR to your own directory."
            )
        shutil.rmtree(folder, ignore_errors=True)  # left by an earlier attempt
        folder.mkdir(mode=0o700)
        for name, content in {OWNER: str(run_dir), **{n: host.environ[n] for n in names}}.items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            with open(descriptor, "wb") as file:
                file.write(os.fsencode(content))  # the bytes as the shell had them
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_mine(folder: Path, host: Host) -> bool:
    """Return whether this is a real directory, not a link, and closed to everybody else."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == host.uid and not status.st_mode & 0o077


def remove_orphans(host: Host) -> None:
    """Remove secrets of launchers that were killed before they could remove them."""
    for base in secret_bases(host):
        if not base.exists() or not _is_mine(base, host):
            continue
        for folder in sorted(
            f for f in base.iterdir() if NAME.fullmatch(f.name) and not f.is_symlink()
        ):
            try:
                run_dir = (folder / OWNER).read_text(encoding="utf-8")
            except (
                FileNotFoundError
            ):  # another launcher is creating or removing it; it holds no secret
                continue
            if run_dir and not rundir.is_locked(Path(run_dir)):
                shutil.rmtree(folder, ignore_errors=True)
