"""Read, write and hash files. Writes are atomic, even if the power fails."""

import dataclasses
import errno
import functools
import hashlib
import json
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeGuard
from uuid import uuid4

BLOCK = 2**26  # bytes; hashing a block takes about 0.1 s
FULL_BYTES = 2**22  # a disk with less free space counts as full
SCALARS = (str, int, float, bool, type(None))
LARGEST = 1e150  # sums and squares of smaller numbers are finite


def plain(node: Any) -> Any:
    """Return a copy with dataclasses, enums and paths replaced by types of JSON and YAML."""
    if type(node) in SCALARS:
        return node
    if isinstance(node, Enum):
        return node.name
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {f.name: plain(getattr(node, f.name)) for f in dataclasses.fields(node)}
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(item) for item in node]
    return str(node) if isinstance(node, Path) else node


def sha256(path: Path, heartbeat: Path | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    Touch `heartbeat` after every block, so that the watchdog does not mistake a long hash for a
    hang.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if heartbeat is not None:
                heartbeat.touch()
    return digest.hexdigest()


def write_error(folder: Path) -> OSError | None:
    """Try to write FULL_BYTES to a directory; return the error, or None.

    Libraries raise various errors if a disk is full, lacks inodes or is read-only, or if a quota or
    `ulimit -f` is exhausted.
    """
    import tempfile  # takes 5 ms

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, FULL_BYTES)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # cannot reserve space at all
            return OSError(error.errno, error.strerror, str(folder))
    return None


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a file; hash it again only if its size or its times have changed."""
    status = path.stat()
    return _sha256_of_version(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=1024)
def _sha256_of_version(path: Path, *version: int) -> str:
    return sha256(path)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write all of `text` or nothing, even if several processes write or the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # that of a failed write has no path
        error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)  # exists only after an error
    sync(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write `content` atomically. Raises ValueError for NaN and infinity, which JSON lacks."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing or has other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def yaml_file(path: Path) -> Any:
    """Return the content of a YAML file of the repository."""
    import yaml  # takes 10 ms

    # The loader in C, which some builds of PyYAML lack, is ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number (not a bool) small enough not to overflow."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def metrics_lines(
    path: Path, is_running: bool = False, constant: Callable[[str], Any] = float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines that are objects with a step, and the problems of the other lines.

    In a running run, an incomplete last line is not a problem. `constant` converts NaN and
    Infinity, which Python writes although JSON lacks them.
    """
    rows, problems = list[dict[str, Any]](), list[str]()
    *lines, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if rest and not is_running:
        lines.append(rest)
    decode = json.JSONDecoder(parse_constant=constant).decode
    for number, line in enumerate(lines, start=1):
        try:
            row = decode(line.decode())
            if not is_number(row["step"]):
                raise ValueError("its step is not a number")
            rows.append(row)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            problems.append(f"line {number}: not an object with a step ({error!r})")
    return rows, problems


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; skip damaged lines, such as one being written."""
    return metrics_lines(path)[0]
