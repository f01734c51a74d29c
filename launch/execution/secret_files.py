"""Store the secrets of containers as files of mode 0400 in a directory in memory.

Containers mount them read-only. They are removed when the run ends.
"""

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

# A file with the path of the run directory. While that is locked, the secrets are in use.
OWNER = ".run"
NAME = re.compile(r"[0-9a-f]{12}")


@contextlib.contextmanager
def written(names: list[str], host: Host, run_dir: Path) -> Iterator[None]:
    """Write the shell's variables of these names to files, and remove them at the end.

    Raises OSError, and HostError if other users can open the directory.
    """
    folder = secret_dir(host, run_dir)
    if names:
        with contextlib.suppress(FileExistsError):
            folder.parent.mkdir(mode=0o700)
        if not _is_mine(folder.parent, host):
            raise HostError(
                f"{folder.parent} has to be a directory that only you can open, because it will "
                "contain secrets. Remove it, or set XDG_RUNTIME_DIR to a directory of yours."
            )
        shutil.rmtree(folder, ignore_errors=True)  # from an earlier attempt
        folder.mkdir(mode=0o700)
        for name, content in {OWNER: str(run_dir), **{n: host.environ[n] for n in names}}.items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            with open(descriptor, "wb") as file:
                file.write(os.fsencode(content))  # the shell's bytes, even if not UTF-8
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_mine(folder: Path, host: Host) -> bool:
    """Return whether this is a directory (not a link) that only this user can open."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == host.uid and not status.st_mode & 0o077


def remove_orphans(host: Host) -> None:
    """Remove the secrets of launchers that were killed."""
    for base in secret_bases(host):
        if not base.exists() or not _is_mine(base, host):
            continue
        for folder in base.iterdir():
            if not NAME.fullmatch(folder.name) or folder.is_symlink():
                continue
            try:
                run_dir = (folder / OWNER).read_text(encoding="utf-8")
            except FileNotFoundError:  # another launcher is creating or removing this folder
                continue
            if run_dir and not rundir.is_locked(Path(run_dir)):
                shutil.rmtree(folder, ignore_errors=True)
