"""Move directories atomically, even if the power fails, hash files, and append lines."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from launch.core.json_files import sha256, sync


def move_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, replacing it, once all files in `source` are on the disk."""
    _sync_tree(source)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by a crash between the two renames
    if target.exists():
        target.rename(old)
    source.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


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
