"""Put rows into Arrow tables, which take less memory than Python objects."""

from __future__ import annotations

from typing import Any

import pyarrow
from datasets import Dataset

from launch.core.errors import UserError
from recipes.data.data_select import TEXT_FIELDS, Row, fields


def message_keys(rows: list[Row]) -> set[Any]:
    """Return the sets of keys that messages have; None stands for messages with nested values."""
    turns = (
        turn
        for row in rows
        for name in TEXT_FIELDS
        if isinstance(row.get(name), list)
        for turn in row[name]
        if isinstance(turn, dict)  # columns for rewards are unchecked
    )
    return {
        None if any(isinstance(value, (dict, list)) for value in turn.values()) else frozenset(turn)
        for turn in turns
    }


def make_table(rows: list[Row], name: str, keys: set[Any], is_complete: bool = True) -> Dataset:
    """Return a table with the fields of all rows; Dataset.from_list uses only the first row's.

    `keys` are those of the messages. Raises UserError for a field without a common type. Raises
    ArrowInvalid if messages differ and the table is not `is_complete`: their column would too.
    """
    # A column of objects would give every message the keys of all, as nulls. Chat templates that
    # test for a key would then render other text. A column of JSON does not.
    differ = len(keys) > 1 or None in keys
    if differ and not is_complete:
        raise pyarrow.ArrowInvalid("messages with different keys")
    try:
        return Dataset.from_dict(
            {field: [row.get(field) for row in rows] for field in fields(rows)},
            on_mixed_types="use_json" if differ else None,
        )
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
        raise UserError(
            f"data={name}: the values of a field have no common type ({error}). Use one type per "
            "field, and integers of at most 64 bits. Write other values as text."
        ) from error
