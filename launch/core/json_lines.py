"""Read users' JSONL files. Each error message names the file, the line, the problem and a fix."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from launch.core.errors import UserError

MAX_ROW = 2**25  # bytes, of which each takes about 60 bytes of memory while a row is tokenized
TOO_LARGE = (
    f"a row of more than {MAX_ROW >> 20} MiB takes too much memory to tokenize. Split its text "
    "into several rows."
)
# the first of the two escapes that JSON uses for a character above U+FFFF, such as an emoji
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `file:line` and the object of each line; skip blank lines. Raises UserError."""
    for number, line in text_lines(path):
        if not line.strip():
            continue
        try:
            row = DECODER.decode(line.rstrip())  # the decoder counts columns from the last newline
            if not isinstance(row, dict):
                raise ValueError(type(row).__name__)
            if ESCAPED_SURROGATE.search(line):  # half a pair is not Unicode: encode() rejects it
                json.dumps(row, ensure_ascii=False).encode()
        except LooseJsonError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        except (ValueError, RecursionError) as error:  # ValueError: also too many digits
            problem = str(error)
            if isinstance(error, json.JSONDecodeError):
                problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise UserError(
                f"{path}:{number}: not a JSON object ({problem}). Write one object per line, such "
                'as {"text": "..."}.'
            ) from error
        yield f"{path}:{number}", row


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line. Raises UserError."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_ROW + 1), b""), 1):
                if len(line) > MAX_ROW:
                    raise UserError(f"{path}:{number}: {TOO_LARGE}")
                # utf-8-sig drops a byte order mark
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
        raise UserError(
            f"{path}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at position "
            f"{error.start + 1} of the line). The file may be {encoding}. Convert it: iconv -f "
            f"{encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(as_jsonl(path)))}"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def as_jsonl(path: Path) -> Path:
    """Return the path that a message suggests for a copy in JSONL: data.csv -> data_rows.jsonl."""
    return path.with_name(re.sub(r"(\.jsonl|\.json|\.csv)?\.\w+$", "", path.name) + "_rows.jsonl")


class LooseJsonError(ValueError):
    """A line is not JSON, but the default decoder would accept it."""


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise LooseJsonError(f'the key "{key}" appears twice. Remove or rename one of them.')
    return row


def _reject_constant(name: str) -> NoReturn:
    raise LooseJsonError(
        f"{name} is not JSON. Write null for a missing value, as pandas does by "
        'DataFrame.to_json(path, orient="records", lines=True).'
    )


# json.loads with these hooks would create a decoder for each line.
DECODER = json.JSONDecoder(
    object_pairs_hook=_without_repeated_keys, parse_constant=_reject_constant
)
