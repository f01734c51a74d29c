"""Read users' files. Each error names the file, the line if possible, the fault and the fix."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.core.errors import UserError, near


def near_files(path: Path) -> str:
    """Return a hint at files or directories next to a missing one whose names are similar."""
    return near(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [])


def json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model or adapter. Raises UserError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it must hold a JSON object, but holds a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: damaged: {error}. Copy or download it again.") from error
    return content


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line. Raises UserError."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # a byte order mark is not part of the row
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
        raise UserError(
            f"{path}:{number}: not UTF-8: byte 0x{error.object[error.start]:02x} at place "
            f"{error.start + 1}, as {encoding} has it. Use: iconv -f {encoding} -t UTF-8 "
            f"{shlex.quote(str(path))} > {shlex.quote(str(as_jsonl(path)))}"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def json_lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield file:line and the parsed row of every line that is not blank. Raises UserError."""
    for number, line in text_lines(path):
        try:
            if line.strip():
                yield f"{path}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers with thousands of digits
            at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise UserError(
                f"{path}:{number}: no JSON ({getattr(error, 'msg', error)}{at})."
            ) from error


def as_jsonl(path: Path) -> Path:
    """Return a file name for the same rows as JSONL."""
    return path.with_name(re.sub(r"(\.jsonl|\.json|\.csv)?\.\w+$", "", path.name) + "_rows.jsonl")
