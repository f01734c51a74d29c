"""Files of the kernel, and of machines copied from one: absent, unreadable, empty or odd means unknown, and never an error."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

MOST = 2**64 - 1


def text(file: str | Path) -> str | None:
    """What stands in a file, None where there is none or nothing."""
    try:
        return Path(file).read_text(errors="replace").strip() or None
    except OSError:
        return None


def status_of(path: Path) -> os.stat_result | None:
    """None where there is nothing, or a folder above it is closed to this user (where Path.exists raises)."""
    try:
        return path.stat()
    except OSError:
        return None


def is_folder(path: Path) -> bool:
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def number(file: str | Path) -> int | None:
    """A decimal integer that is all there is in the file."""
    return as_number(text(file))


def total_memory(root: str | Path) -> int | None:
    """Bytes of memory that the machine has whose files lie under `root`."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", text(Path(root) / "proc/meminfo") or "", re.MULTILINE)
    kilobytes = as_number(found.group(1)) if found else None
    return kilobytes * 1024 if kilobytes is not None else None


def as_number(value: str | None) -> int | None:
    """None too for what has more than 64 bits: the kernel counts nothing in more, and no float holds much more."""
    try:
        found = None if value is None else int(value)
    except ValueError:
        return None
    return found if found is not None and abs(found) <= MOST else None


def as_decimal(value: str | None) -> float | None:
    """The first word, as in `32.0 GT/s PCIe`."""
    try:
        return float((value or "").split()[0])
    except (ValueError, IndexError):
        return None


def properties(file: Path) -> dict[str, int]:
    """`name value` lines; those whose value is not a number are left out."""
    pairs = [line.split() for line in (text(file) or "").splitlines()]
    found = {pair[0]: as_number(pair[1]) for pair in pairs if len(pair) == 2}
    return {name: value for name, value in found.items() if value is not None}


def folders(parent: Path) -> list[Path]:
    """Subfolders that are named by a number, in its order."""
    try:
        return sorted((path for path in parent.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    except OSError:
        return []
