"""Read the kernel's files in /sys and /proc, or copies of them.

No function raises an error. If a file is missing, unreadable, empty or malformed, its value is
unknown.
"""

import os
import re
import stat
from pathlib import Path

LARGEST = 2**64 - 1  # the kernel's largest integer


def text(file: str | Path) -> str | None:
    """Return the stripped content of a file; None if it is missing, unreadable or empty."""
    try:
        return Path(file).read_text(errors="replace").strip() or None
    except OSError:
        return None


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a path; None if it is missing or in a folder that cannot be searched."""
    try:
        return path.stat()
    except OSError:
        return None


def is_folder(path: Path) -> bool:
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def number(file: str | Path) -> int | None:
    """Return the decimal integer in a file; None if unknown."""
    return as_number(text(file))


def total_memory(root: str | Path) -> int | None:
    """Return the machine's memory in bytes, from the files under `root`; None if unknown."""
    meminfo = text(Path(root) / "proc/meminfo") or ""
    total = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    kilobytes = as_number(total[1]) if total else None
    return kilobytes * 1024 if kilobytes is not None else None


def as_number(value: str | None) -> int | None:
    """Parse an integer of at most 64 bits; None if malformed."""
    try:
        number = int(value or "")
    except ValueError:
        return None
    return number if abs(number) <= LARGEST else None


def as_decimal(value: str | None) -> float | None:
    """Parse the first word of `value`, as in `32.0 GT/s PCIe`; None if malformed."""
    try:
        return float((value or "").split()[0])
    except (ValueError, IndexError):
        return None


def properties(file: Path) -> dict[str, int]:
    """Return the integers in the `name value` lines of a file by name; skip other lines."""
    pairs = [line.split() for line in (text(file) or "").splitlines()]
    numbers = {pair[0]: as_number(pair[1]) for pair in pairs if len(pair) == 2}
    return {name: value for name, value in numbers.items() if value is not None}


def folders(parent: Path) -> list[Path]:
    """Return the subfolders whose names are numbers, in numeric order."""
    try:
        return sorted(
            (path for path in parent.iterdir() if path.name.isdecimal()),
            key=lambda path: int(path.name),
        )
    except OSError:
        return []
