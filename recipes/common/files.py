"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

BLOCK = 2**26  # bytes read at once; a tenth of a second at 0.7 GB/s, which is what one core hashes


def write_json(path: Path, content: Any) -> None:
    """Write `content` beside `path`, then rename it there. NaN is refused: it is no JSON."""
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def move_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target` after everything in it has reached the disk. An old `target` is replaced."""
    _sync_tree(source)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by a crash between the two renames
    if target.exists():
        target.rename(old)
    source.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def place_directory(source: Path, target: Path) -> None:
    """As move_directory, but a `target` that is there stays, and `source` goes. Raises OSError."""
    _sync_tree(source)
    try:
        source.rename(target)
    except OSError:  # a directory that is not empty
        if not target.is_dir():
            raise
        shutil.rmtree(source)
    sync(target.parent)


def _sync_tree(source: Path) -> None:
    for path in sorted(source.rglob("*")):
        sync(path)
    sync(source)


def sync(path: Path) -> None:
    """fsync of a file, or of a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path, heartbeat: Path | None = None) -> str:
    """Of a file's content. `heartbeat` is touched after every block: the launcher's watchdog sees nothing else move meanwhile."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            found.update(block)
            if heartbeat is not None:
                heartbeat.touch()
    return found.hexdigest()


def weights_sha256(directory: Path, heartbeat: Path | None = None) -> str:
    """One hash of all .safetensors of a model directory: of their names and hashes, in the order of the names.

    `heartbeat` as in sha256.
    """
    total = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        total.update(f"{path.name} {sha256(path, heartbeat)}\n".encode())
    return total.hexdigest()


def json_sha256(value: Any) -> str:
    """Hash of what can stand in JSON, equal for equal content."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a line, flushed: the launcher reads the file while it grows."""
    with path.open("a") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
