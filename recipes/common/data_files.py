"""Rows of a local JSONL file, each with the line that it stands on in what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipes.common.data_check import check_row
from recipes.common.data_select import TEXT_FIELDS, Row, normalized, question, spelled
from recipes.common.errors import UserError, near
from recipes.common.rewards import CODE_TESTS
from recipes.common.verify_code import parse_tests

ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # two make one character beyond 16 bits, such as an emoji


def lines(path: str, method: str) -> Iterator[Row]:
    """The rows of a file, with the fields that `method` reads. Raises UserError, with the line's number."""
    for where, row in parsed(path):
        check_row(row, where, method)
        yield row


def parsed(path: str) -> Iterator[tuple[str, Row]]:
    """(file:line, object) of every line that is not blank, whatever its fields. Raises UserError, with the line's number."""
    file = Path(path)
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.jsonl")] if file.parent.is_dir() else []
        hint = near(file.name, siblings) if siblings else "Give the path of an existing file."
        raise UserError(f"data file {path}: there is no such file. {hint}")
    with file.open("rb") as found:
        for number, line in enumerate(found, start=1):
            text = _decoded(line, f"{path}:{number}", "utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield f"{path}:{number}", _object(text, f"{path}:{number}")


def paths_of(data: DictConfig) -> list[str]:
    """The files and directories that the rows of `data`, and its held-out ones, are read from."""
    return [path for path in (data.path, data.heldout_path, *(source.path for source in data.sources)) if path]


def line_of(row: Row, paths: Iterable[str]) -> str | None:
    """file:line of the first row with the same texts; None where no file has one. Of files that were read whole before."""
    texts = {name: spelled(row[name]) for name in TEXT_FIELDS if row.get(name) is not None}
    for path in filter(os.path.isfile, paths):  # samples may be those of a directory
        for where, found in parsed(path):
            if all(isinstance(found.get(name), (str, list)) and spelled(found[name]) == text for name, text in texts.items()):
                return where
    return None


def check_tests(config: DictConfig, rows: Iterable[Row]) -> None:
    """Raises UserError for the first row whose tests are none, which a run would find at that prompt's turn; a stream is not read."""
    if CODE_TESTS not in config.method.rewards or not isinstance(rows, Sized):
        return
    for row in rows:
        try:
            parse_tests(row["tests"])
        except UserError as error:
            line = line_of(row, paths_of(config.data))
            raise UserError(f"{line}: {error}" if line else str(error)) from error


def asked_in(rows: Iterable[Row], path: str) -> int:
    """How many of `rows` have the question of a row of the file, but for case and spaces; rows of it that no method reads ask nothing."""
    asked = set()
    with contextlib.suppress(UserError):  # who trains on the file says what is wrong with it
        for _, row in parsed(path):
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                asked.add(normalized(question(row)))
    return sum(normalized(question(row)) in asked for row in rows)


def _decoded(line: bytes, where: str, encoding: str) -> str:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8: byte 0x{error.object[error.start]:02x} at place {error.start + 1}. Write the file as UTF-8."
        ) from error


class _Twice(Exception):
    """A key that an object has more than once."""


def _once(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for n, key in enumerate(keys) if key in keys[:n]))
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_once)  # json.loads would make one for each line


def _object(text: str, where: str) -> Row:
    try:
        row = DECODER.decode(text)
    except _Twice as error:
        raise UserError(
            f'{where}: has the key "{error}" twice, and only the last value would be read. Remove one, or rename it.'
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}). Every line must be one JSON object.") from error
    except ValueError as error:  # Python converts no more digits, for safety
        raise UserError(f"{where}: has a number of more than {sys.get_int_max_str_digits()} digits. Write it as text.") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep to be read. Every line must be one row.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__}, and every line must be one JSON object.")
    if ESCAPED_SURROGATE.search(text):
        _check_whole_characters(row, where)
    return row


def _check_whole_characters(row: Row, where: str) -> None:
    """Raises UserError for a surrogate without its other half, which no table takes: JSON may escape it, UTF-8 has no bytes for it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise UserError(f"{where}: has \\u{half:04x}, half of a character without its other half. Remove it, or complete it.") from error
