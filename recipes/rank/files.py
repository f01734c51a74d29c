"""Move directories atomically, even if the power fails, hash files, and append lines."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.core.json_files import sha256, sync, write_error


def move_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, replacing it, once all files in `source` are on the disk."""
    _sync_tree(source)
    old = target.with_name(f".{target.name}.old")
    remove(old)  # left by a crash between the two renames
    if os.path.lexists(target):  # also a broken link
        target.rename(old)
    source.rename(target)
    sync(target.parent)
    remove(old)


@contextlib.contextmanager
def staging(staged: Path) -> Iterator[None]:
    """Remove `staged` if writing fails and its disk is full. Raises OSError with the path.

    The space is needed to report the failure, and to repeat the command.
    """
    try:
        yield
    except Exception as error:
        if (full := write_error(staged.parent)) is None:
            raise
        shutil.rmtree(staged, ignore_errors=True)
        raise full from error


def remove(path: Path) -> None:
    """Remove a file, a directory or a link, but not its target, if `path` exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def place_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, or remove `source` if `target` exists. Raises OSError."""
    _sync_tree(source)
    try:
        source.rename(target)
    except OSError:  # the target is a directory that is not empty
        if not target.is_dir():
            raise
        shutil.rmtree(source)
    sync(target.parent)


def _sync_tree(source: Path) -> None:
    for path in sorted(source.rglob("*")):
        sync(path)
    sync(source)


def weights_sha256(directory: Path, heartbeat: Path | None = None) -> str:
    """Return a hash of the sorted names and hashes of a model directory's .safetensors files.

    `heartbeat` is touched while files are read, as in sha256.
    """
    total = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        total.update(f"{path.name} {sha256(path, heartbeat)}\n".encode())
    return total.hexdigest()


def json_sha256(value: Any) -> str:
    """Return the sha256 of a value as JSON with sorted keys, so equal content has equal hashes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a row as a JSON line in one write, because the launcher reads the file as it grows."""
    with path.open("a") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
