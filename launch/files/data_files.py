"""The files that data and templates name: that they are there, and that they hold rows of JSON."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

from launch.errors import UserError, near
from launch.schema import Config

NAMED = 8  # files of a directory, in an error
LINES_READ = 10_000  # of a data file, for bytes that are no text: more would make a plan slow
HEAD = 65536  # bytes of it, for its format
# First bytes -> what the file is, and the command that makes JSONL of it ({old} and {new}), or a format of datasets.load_dataset.
BINARY = {
    b"\x1f\x8b": ("gzip-compressed", "gzip -dc {old} > {new}"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstd -dc {old} > {new}"),
    b"\xfd7zXZ": ("compressed by xz", "xz -dc {old} > {new}"),
    b"BZh": ("compressed by bzip2", "bzip2 -dc {old} > {new}"),
    b"PK\x03\x04": ("a ZIP archive or a spreadsheet", "unzip {old}, or save the spreadsheet as CSV"),
    b"PAR1": ("Parquet", "parquet"),
    b"\xff\xfe": ("UTF-16 and not UTF-8", "iconv -f UTF-16 -t UTF-8 {old} > {new}"),
    b"\xfe\xff": ("UTF-16 and not UTF-8", "iconv -f UTF-16 -t UTF-8 {old} > {new}"),
}
HEADER = re.compile(r'"?\w[\w ]*"?(?:([,;\t])"?\w[\w ]*"?)+')  # the first line of a CSV file: names
# Fields of other programs' rows -> what makes TRL's of them. recipes/common/data_check.py says it of any row.
RENAMINGS = {
    ("conversations",): "rename conversations to messages, in its turns from to role (human: user, gpt: assistant), value to content",
    ("instruction", "output"): "join instruction and input as prompt, and rename output to completion (sft) or answer (grpo, evaluate)",
}
KNOWN = {"prompt", "messages", "text", "chosen"}  # of which a row of every method has one


def named_files(config: Config) -> dict[str, str]:
    """Key -> file, of those that data and templates name beside data.path and data.heldout_path."""
    found = {f"data.sources[{n}].path": source.path for n, source in enumerate(config.data.sources)}
    found |= {"model.chat_template": config.model.chat_template, "data.chat_template": config.data.chat_template}
    found |= {"data.pass_rates": config.data.pass_rates}
    found |= {"data.path": config.data.path} if config.data.kind == "samples" else {}
    return {key: path for key, path in found.items() if path}


def check_is_file(key: str, path: Path) -> None:
    """Raises UserError where there is no file at `path`, with the names of those that it may have been."""
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.jsonl"))
        named = f" It has {', '.join(inside[:NAMED])}{', ...' if len(inside) > NAMED else ''}." if inside else ""
        raise UserError(f"{key}={path}: a directory, and one file is needed.{named}")
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{key}={path}: no such file.{near(path.name, beside)}")
    if key in ("data.path", "data.heldout_path") or key.startswith("data.sources["):
        _check_rows(path)


def _check_rows(path: Path) -> None:
    """Raises UserError for a file of rows that is no JSONL or no UTF-8, or whose first row has another program's fields."""
    number = 0
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
            other = _other_format(head, path)
            file.seek(0)
            for line in itertools.islice(file, 0 if other else LINES_READ):
                number += 1
                line.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}:{number}: not UTF-8: byte 0x{error.object[error.start]:02x} at place {error.start + 1}, as Latin-1 or Windows-1252 "
            f"has it. Use: iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(_beside(path)))}"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    if other:
        raise UserError(f"{path}:1: {other[0]}, and a JSONL file has one JSON object a line. Use: {other[1]}")
    try:
        row = json.loads(head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):  # whoever reads the rows says it with its column
        return
    names = row.keys() if isinstance(row, dict) else set()
    how = next((how for fields, how in RENAMINGS.items() if names.isdisjoint(KNOWN) and names >= set(fields)), None)
    if how:
        raise UserError(f"{path}:1: has {', '.join(names)}, and rows have other fields here. Use: {how}.")


def _other_format(head: bytes, path: Path) -> tuple[str, str] | None:
    """(what a file is, the command that makes JSONL of it) by its first bytes; None where they may be JSONL's."""
    old, new = str(path), str(_beside(path))
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().decode(errors="replace").partition("\n")[0].strip()
    header = HEADER.fullmatch(line)
    found, options = next((kind for start, kind in BINARY.items() if head.startswith(start)), None), ""
    if line.startswith("["):
        found = "a JSON list", "json"
    elif line == "{":
        found = "a JSON object over several lines", "json"
    elif found is None and line and not line.startswith("{") and (header or path.suffix in (".csv", ".tsv")):
        found, options = ("CSV by its first line", "csv"), f", sep={json.dumps(header[1])}" if header and header[1] != "," else ""
    if found is None:
        return None
    what, how = found
    if how.isalpha():
        loads = f'datasets.load_dataset("{how}", data_files={json.dumps(old)}{options})["train"].to_json({json.dumps(new)})'
        return what, f"python -c {shlex.quote(f'import datasets; {loads}')}"
    return what, how.format(old=shlex.quote(old), new=shlex.quote(new))


def _beside(path: Path) -> Path:
    """A name for the same rows as JSONL."""
    return path.with_name(re.sub(r"(\.jsonl|\.json|\.csv)?\.\w+$", "", path.name) + "_rows.jsonl")


def check_data_files(config: Config) -> None:
    """Raises UserError for a file that is not there, or is a directory, and a cache that is a file."""
    for key, path in named_files(config).items():
        if key != "data.path" or not Path(path).is_dir():  # samples may be a directory, such as that of a run
            check_is_file(key, Path(path))
    if config.data.cache and Path(config.data.cache).is_file():
        raise UserError(f"data.cache={config.data.cache}: a file. Name a directory.")
