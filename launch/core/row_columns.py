"""Rename the fields of rows, extract answers and add the system prompt, as `data` says."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from launch.core.errors import UserError, near
from launch.core.near_names import columns_hint, has_all, partly_mapped
from launch.core.row_formats import row_format
from launch.core.row_messages import SYSTEM_ROLES, Row

QUOTE_LENGTH = 60  # maximum characters of an answer in an error message


def mapped(
    rows: Iterable[tuple[str, Row]], data: Any, method: str | None
) -> Iterator[tuple[str, Row]]:
    """Yield each row's place and the row with `method`'s fields. Raises UserError with the place.

    `data` has columns, answer_pattern and system_prompt of launch/schema/data.py.
    """
    change = _change(data, method)
    for where, row in rows:
        try:
            changed = change(row)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        yield where, changed


def mapping_of(data: Any, source: Any) -> dict[str, Any]:
    """Return the keys with which a source of a mix maps its fields: its own, or else `data`'s."""
    pattern = source.answer_pattern or data.answer_pattern
    return {"columns": {**data.columns, **source.columns}, "answer_pattern": pattern}


def _change(data: Any, method: str | None) -> Callable[[Row], Row]:
    columns = dict(data.columns)  # OmegaConf's access would dominate the time
    partial = partly_mapped(columns)
    try:
        pattern = re.compile(data.answer_pattern) if data.answer_pattern else None
    except re.error as error:
        raise UserError(f"data.answer_pattern={data.answer_pattern}: {error}") from error
    system = data.system_prompt
    form = row_format(method) if method else None
    needed = {*form.read, *form.rewards} if form else set()

    def change(row: Row) -> Row:
        if form := next((form for form in partial if has_all(row, form["fields"])), None):
            lost = form["lost"][0]
            raise ValueError(
                f"has text in {lost}, which data.columns leaves out. Use: {form['use']}; or "
                f"data.columns.{lost}=null to drop the text."
            )
        if columns:
            row = _renamed(row, columns, needed)
        if pattern and row.get("answer") is not None:
            row = {**row, "answer": _answer(pattern, row["answer"])}
        return row if system is None else _with_system(row, system)

    return change


def _renamed(row: Row, columns: dict[str, str | None], needed: set[str]) -> Row:
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    for field, name in columns.items():
        renamed.pop(field, None)
        if name is None:
            continue
        if name in needed and name not in row and field in row:
            pairs = ", ".join(f"{right}: {left}" for left, right in columns.items())
            raise ValueError(
                f"data.columns.{field}={name} is reversed, because the row has {field}. Use: "
                f"'data.columns={{{pairs}}}'."
            )
        value, parts = row, [name] if name in row else name.split(".")
        for part in parts:
            if not isinstance(value, dict) or part not in value:
                if field not in needed:
                    break
                hint = near(part, value) if isinstance(value, dict) else ""
                use = columns_hint(row, (field,)) or f"data.columns.{field}=<a field of the row>"
                raise ValueError(
                    f"data.columns.{field}={name}, but the row has {', '.join(row) or 'no field'}."
                    f"{hint} Use: {use}."
                )
            value = value[part]
        else:
            renamed[field] = value
    return renamed


def _answer(pattern: re.Pattern[str], answer: Any) -> str:
    """Return the last match of the pattern in an answer: its first group, or else all of it."""
    matches = [match[1] if pattern.groups else match[0] for match in pattern.finditer(str(answer))]
    if not matches or not (matches[-1] or "").strip():
        text = json.dumps(answer, ensure_ascii=False, default=str)
        raise ValueError(
            f"data.answer_pattern={pattern.pattern!r} finds nothing in the answer "
            f"{text:.{QUOTE_LENGTH}}. Correct the pattern, or remove the row."
        )
    return str(matches[-1]).strip()


def _with_system(row: Row, system: str) -> Row:
    """Return a row with conversations that begin with their own or this system prompt."""

    def begin(value: Any) -> Any:
        turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
        first = turns[0] if isinstance(turns, list) and turns else None
        if not isinstance(first, dict) or first.get("role") in SYSTEM_ROLES:
            return value
        return [*([{"role": "system", "content": system}] if system else ()), *turns]

    names = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if not names:
        names = [name for name in ("chosen", "rejected") if isinstance(row.get(name), list)]
    return {**row, **{name: begin(row[name]) for name in names}}
