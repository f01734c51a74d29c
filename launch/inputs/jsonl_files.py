"""Check that files of data and templates exist, and that files of rows are JSONL."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import shlex
from pathlib import Path

from launch.core.errors import UserError
from launch.core.json_lines import as_jsonl, text_lines
from launch.inputs.reading import near_files
from launch.schema import Config

MAX_NAMES = 8  # files of a directory in an error
MAX_LINES = 10_000  # lines searched for bytes that are not UTF-8; more would slow a plan
MAX_COUNTED = 100 * 10**6  # bytes of a file whose rows are counted, which takes a tenth of a second
HEAD_BYTES = 65536  # read to recognize the format
# First bytes of a file -> its format, and the name of its builder in datasets.load_dataset.
FORMATS = {
    **dict.fromkeys(
        (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"PK\x03\x04"),
        ("compressed", "json"),
    ),
    b"PAR1": ("Parquet", "parquet"),
    b"[": ("a JSON list", "json"),
}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HEADER = re.compile(r'"?\w[\w ]*"?(?:([,;\t])"?\w[\w ]*"?)+')  # a CSV file's first line


def named_files(config: Config) -> dict[str, str]:
    """Return key -> file of data and templates, except data.path and heldout_path of JSONL."""
    data = config.data
    files = {f"data.sources[{n}].path": source.path for n, source in enumerate(data.sources)}
    files |= {"model.chat_template": config.model.chat_template}
    files |= {"data.chat_template": data.chat_template, "data.pass_rates": data.pass_rates}
    files |= {"data.path": data.path} if data.kind == "samples" else {}
    return {key: path for key, path in files.items() if path}


def local_sets(config: Config) -> dict[str, Path]:
    """Return key -> directory of the data sets with `hub_id` that are not on the Hub."""
    ids = {"data.hub_id": config.data.hub_id or ""}
    sources = enumerate(config.data.sources)
    ids |= {f"data.sources[{n}].hub_id": source.hub_id or "" for n, source in sources}
    return {key: Path(path) for key, path in ids.items() if Path(path).is_absolute()}


def local_set_files(config: Config) -> list[str]:
    """Return the files of those data sets."""
    folders = local_sets(config).values()
    return sorted(str(p) for folder in folders for p in folder.rglob("*") if p.is_file())


def check_is_file(key: str, path: Path) -> None:
    """Raise UserError if `path` is not a file or, for a file of rows, not JSONL."""
    if not path.is_file():
        names = sorted(p.name for p in path.glob("*.jsonl"))
        listed = " or ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])])
        problem = f"no such file.{near_files(path)}"
        if path.is_dir():
            problem = "a directory, but one file is needed." + (f" Use: {listed}." if names else "")
        raise UserError(f"{key}={path}: {problem}")
    if key.endswith(".chat_template"):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
            raise UserError(f"{key}={path}: not UTF-8 ({byte}). Save the file as UTF-8.") from error
    if key in ("data.path", "data.heldout_path") or key.startswith("data.sources["):
        _check_rows(path)


def _check_rows(path: Path) -> None:
    """Raise UserError if a file is not JSONL in UTF-8."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        head = b""  # text_lines reports the error
    problem = _other_format(head, path)
    if problem is None:
        for _ in itertools.islice(text_lines(path), MAX_LINES):
            pass
    if problem:
        raise UserError(f"{path}:1: {problem[0]}. Use: {problem[1]}")


def _other_format(head: bytes, path: Path) -> tuple[str, str] | None:
    """Return why a file is not JSONL, and a command that converts it; None if it may be JSONL."""
    content = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    line = content.partition(b"\n")[0].strip().decode(errors="replace")
    formats = (names for start, names in FORMATS.items() if content.startswith(start))
    name, reader = next(formats, ("", ""))
    options, header = "", HEADER.fullmatch(line)
    if line == "{":
        name, reader = "a JSON object over several lines", "json"
    elif not name and line and not line.startswith("{") and (header or ".csv" in path.suffixes):
        name, reader = "CSV, judging by its first line", "csv"
        options = f", sep={json.dumps(header[1])}" if header and header[1] != "," else ""
    if not name:
        return None
    files = f"data_files={json.dumps(str(path))}{options}"
    rows = json.dumps(str(as_jsonl(path)))
    code = f'import datasets; datasets.load_dataset("{reader}", {files})["train"].to_json({rows})'
    problem = f"{name}, but a JSONL file has one JSON object per line"
    return problem, f"python -c {shlex.quote(code)}"


def num_rows(path: str | None) -> int | None:
    """Return the number of rows of a JSONL file; None if it is missing or too large to count."""
    file = Path(path or "")
    with contextlib.suppress(OSError):
        state = file.stat()
        if file.is_file() and state.st_size <= MAX_COUNTED:
            return _count(file, state.st_size, state.st_mtime_ns)
    return None


@functools.cache  # choices estimate dozens of steps; size and time of a file are in the key
def _count(file: Path, _size: int, _mtime_ns: int) -> int:
    with file.open("rb") as lines:
        return sum(not line.isspace() for line in lines)


def check_data_files(config: Config) -> None:
    """Raise UserError for a missing file or data set, or for rows that are not JSONL."""
    for key, folder in local_sets(config).items():
        if not folder.is_dir():
            raise UserError(f"{key}={folder}: no such directory.{near_files(folder)}")
    for key, path in named_files(config).items():
        # data=samples also reads a directory, such as a run directory.
        if key != "data.path" or not Path(path).is_dir():
            check_is_file(key, Path(path))
