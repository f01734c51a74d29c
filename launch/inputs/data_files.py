"""Check that the files of data and templates exist and hold rows of JSON."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

from launch.core.errors import UserError
from launch.core.near_names import renaming
from launch.inputs.reading import as_jsonl, near_files, text_lines
from launch.schema import Config

NAMED = 8  # files of a directory that an error lists
LINES_READ = 10_000  # lines searched for bytes that are not text; more would slow a plan
HEAD = 65536  # bytes of the file that decide its format
# First bytes -> what the file is, and the command that converts it to JSONL ({old} and {new}), or a
# format of datasets.load_dataset.
BINARY = {
    b"\x1f\x8b": ("gzip-compressed", "gzip -dc {old} > {new}"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstd -dc {old} > {new}"),
    b"\xfd7zXZ": ("compressed by xz", "xz -dc {old} > {new}"),
    b"BZh": ("compressed by bzip2", "bzip2 -dc {old} > {new}"),
    b"PK\x03\x04": (
        "a ZIP archive or a spreadsheet",
        "unzip {old}, or save the spreadsheet as CSV",
    ),
    b"PAR1": ("Parquet", "parquet"),
    b"\xff\xfe": ("UTF-16 and not UTF-8", "iconv -f UTF-16 -t UTF-8 {old} > {new}"),
    b"\xfe\xff": ("UTF-16 and not UTF-8", "iconv -f UTF-16 -t UTF-8 {old} > {new}"),
}
HEADER = re.compile(r'"?\w[\w ]*"?(?:([,;\t])"?\w[\w ]*"?)+')  # the first line of a CSV file: names
KNOWN = {"prompt", "messages", "text", "chosen"}  # a row of every method has one of them


def named_files(config: Config) -> dict[str, str]:
    """Return key -> file of data and templates, without JSONL's data.path and heldout_path."""
    data = config.data
    files = {f"data.sources[{n}].path": source.path for n, source in enumerate(data.sources)}
    files |= {"model.chat_template": config.model.chat_template}
    files |= {"data.chat_template": data.chat_template, "data.pass_rates": data.pass_rates}
    files |= {"data.path": data.path} if data.kind == "samples" else {}
    return {key: path for key, path in files.items() if path}


def check_is_file(key: str, path: Path) -> None:
    """Raise UserError with similar names if there is no file of the right kind at `path`."""
    if not path.is_file():
        names = sorted(p.name for p in path.glob("*.jsonl"))
        listed = ", ".join([*names[:NAMED], *(["..."] if len(names) > NAMED else [])])
        fault = f"no such file.{near_files(path)}"
        if path.is_dir():
            fault = "a directory, and one file is needed." + (f" It has {listed}." if names else "")
        raise UserError(f"{key}={path}: {fault}")
    if key in ("data.path", "data.heldout_path") or key.startswith("data.sources["):
        _check_rows(path)


def _check_rows(path: Path) -> None:
    """Raise UserError for a file that is not JSONL in UTF-8, or has another program's fields."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    if other := _other_format(head, path):
        raise UserError(
            f"{path}:1: {other[0]}, and a JSONL file has one JSON object a line. Use: {other[1]}"
        )
    for _ in itertools.islice(text_lines(path), LINES_READ):
        pass
    try:
        row = json.loads(head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):  # json_lines reports it if the rows are read here
        return
    names = row.keys() if isinstance(row, dict) else set()
    remedy = renaming(names) if names.isdisjoint(KNOWN) else None
    if remedy:
        raise UserError(
            f"{path}:1: has {', '.join(names)}, and rows have other fields here. Use: {remedy}."
        )


def _other_format(head: bytes, path: Path) -> tuple[str, str] | None:
    """Return a file's format and the command that converts it; None if it may be JSONL."""
    old, new = str(path), str(as_jsonl(path))
    content = head.removeprefix(b"\xef\xbb\xbf").lstrip().decode(errors="replace")
    line = content.partition("\n")[0].strip()
    header, options = HEADER.fullmatch(line), ""
    is_csv = header or path.suffix in (".csv", ".tsv")
    kind = next((kind for start, kind in BINARY.items() if head.startswith(start)), None)
    if line.startswith("["):
        kind = "a JSON list", "json"
    elif line == "{":
        kind = "a JSON object over several lines", "json"
    elif kind is None and line and not line.startswith("{") and is_csv:
        kind = "CSV by its first line", "csv"
        options = f", sep={json.dumps(header[1])}" if header and header[1] != "," else ""
    if kind is None:
        return None
    name, how = kind
    if how.isalpha():
        files = f"data_files={json.dumps(old)}{options}"
        loads = f'datasets.load_dataset("{how}", {files})["train"].to_json({json.dumps(new)})'
        return name, f"python -c {shlex.quote(f'import datasets; {loads}')}"
    return name, how.format(old=shlex.quote(old), new=shlex.quote(new))


def check_data_files(config: Config) -> None:
    """Raise UserError for a file that is missing or a directory, and for a cache that is a file."""
    for key, path in named_files(config).items():
        # Samples may be a directory, such as that of a run.
        if key != "data.path" or not Path(path).is_dir():
            check_is_file(key, Path(path))
    if config.data.cache and Path(config.data.cache).is_file():
        raise UserError(f"data.cache={config.data.cache}: a file. Name a directory.")
