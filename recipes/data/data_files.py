"""Read the rows of a local JSONL file; errors name the line."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from recipes.data.data_check import check_row
from recipes.data.data_select import Row, beginning, normalized, question
from recipes.rewards.reward_functions import CODE_TESTS
from recipes.rewards.verify_code import parse_tests

# JSON escapes a character beyond 16 bits, such as an emoji, as two surrogates.
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def lines(path: str, method: str) -> Iterator[Row]:
    """Yield the rows of a file. Raises UserError for the first row that `method` cannot use."""
    for where, row in parsed(path):
        check_row(row, where, method)
        yield row


def parsed(path: str) -> Iterator[tuple[str, Row]]:
    """Yield (file:line, object) of every line that is not blank. Raises UserError."""
    with Path(path).open("rb") as content:
        for number, line in enumerate(content, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = DECODER.decode(text)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}")
                if ESCAPED_SURROGATE.search(text):  # reject a lone one, which no table can hold
                    json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path}:{number}: not a JSON object in UTF-8 ({error}). Write one object per "
                    "line."
                ) from error
            yield f"{path}:{number}", row


def check_tests(config: DictConfig, rows: Iterable[Row]) -> None:
    """Reject tests that cannot be parsed, before a run reaches their prompt."""
    if CODE_TESTS not in config.method.rewards or not isinstance(rows, Sized):  # skip streams
        return
    for row in rows:
        try:
            parse_tests(row["tests"])
        except UserError as error:
            raise UserError(f"the row with the {beginning(row)}: {error}") from error


def num_known_questions(rows: Iterable[Row], path: str) -> int:
    """Count the `rows` whose question is also in the file, ignoring case and spaces."""
    questions = set()
    with contextlib.suppress(UserError):  # training on the file reports its faults
        for _, row in parsed(path):
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                questions.add(normalized(question(row)))
    return sum(normalized(question(row)) in questions for row in rows)


def _once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f'the key "{twice}" appears twice')
    return row


DECODER = json.JSONDecoder(object_pairs_hook=_once)  # json.loads would make one for each line
