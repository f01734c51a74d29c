"""Check the rows of local files before processes start, as the ranks do when they load them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from launch.core import row_formats
from launch.core.errors import UserError, near
from launch.core.json_lines import json_rows
from launch.core.row_check import check_forms, check_row, conformed, form_of
from launch.core.row_columns import mapped
from launch.core.row_tests import parse_tests
from launch.inputs.jsonl_files import check_is_file
from launch.schema import Config
from launch.schema.data import Data, Source
from launch.schema.enums import Init

PLAN_LINES = 10_000  # lines whose fields mode=plan checks; a run checks all
FIRST_ROWS = 500  # rows whose values are checked, which takes a hundredth of a second
TOKENIZER = "tokenizer"  # in place of a row format


@dataclass(frozen=True)
class _File:
    """A file and the format that its rows need, if any; `data` has the keys that map its fields."""

    key: str
    path: Path
    row_format: str | None
    data: Data | Source
    is_judged: bool  # by rewards


def check_rows(config: Config, all_lines: bool) -> None:
    """Raise UserError for the first row that the run could not use.

    Without `all_lines`, read only the first PLAN_LINES lines of a file.
    """
    forms: set[str] = set()
    for file in _files(config):
        check_is_file(file.key, file.path)
        fields = _check_file(config, file, forms, None if all_lines else PLAN_LINES)
        if file.is_judged:
            _check_rewards(config, file, fields)
    if forms:
        check_forms(forms, config.data.name, str(config.method.rows))


def _files(config: Config) -> Iterator[_File]:
    data, rows = config.data, config.method.rows
    judged = bool(config.method.rewards) and not config.method.measures_model
    for number, source in enumerate(data.sources):
        if source.path:
            mapping = _of_source(data, source)
            yield _File(f"data.sources[{number}].path", Path(source.path), rows, mapping, judged)
    if data.kind == "samples" and Path(data.path or "").is_file():
        yield _File("data.path", Path(str(data.path)), "samples", data, False)
    if data.kind != "jsonl":
        return
    train = rows
    if config.method.measures_model:
        # An evaluation holds out rows of data.path, makes a tokenizer from them, or does neither.
        makes_tokenizer = config.model.path is None and config.model.init == Init.random
        train = TOKENIZER if makes_tokenizer else None
        train = "evaluate" if data.heldout_fraction else train
    if data.path:
        yield _File("data.path", Path(data.path), train, data, judged)
    if data.heldout_path:
        heldout = rows if config.method.selection.metric else "evaluate"
        yield _File("data.heldout_path", Path(data.heldout_path), heldout, data, False)


def _of_source(data: Data, source: Source) -> Data:
    """Return `data` with the keys that the source sets itself (recipes/data/data_load.py)."""
    return replace(
        data,
        columns={**data.columns, **source.columns},
        answer_pattern=source.answer_pattern or data.answer_pattern,
    )


def _check_file(
    config: Config, file: _File, forms: set[str], number: int | None
) -> dict[str, None]:
    """Check a file's rows, add the forms of its first rows to `forms`, and return all fields."""
    place, reader = "", f"{file.key} of method={file.row_format}"
    row_format, fields = file.row_format, dict[str, None]()
    if row_format == TOKENIZER:
        row_format, reader = "sft", f"{file.key}, from which random weights get a tokenizer,"
    rows = mapped(json_rows(file.path), file.data, row_format)
    for n, (place, row) in enumerate(itertools.islice(rows, number)):
        fields |= dict.fromkeys(row)
        if row_format is None:
            continue
        if problem := row_formats.fields_problem(row, row_format, reader):
            model = " Use: model.path=<a trained model>." if "tokenizer" in reader else ""
            raise UserError(f"{place}: {problem}{model}")
        if n < FIRST_ROWS:
            row = conformed(row, row_format)
            check_row(row, place, row_format)
            if file.is_judged and "code_tests" in config.method.rewards and "tests" in row:
                _check_tests(place, row["tests"])
            if row_format == config.method.rows:
                forms.add(form_of(row, row_format))
    if not place:
        key = file.key
        raise UserError(f"{key}={file.path}: the file has no rows. Use: {key}=<a file with rows>.")
    return fields


def _check_tests(place: str, tests: object) -> None:
    try:
        parse_tests(tests)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _check_rewards(config: Config, file: _File, fields: dict[str, None]) -> None:
    """Raise UserError if no row has the field that a reward reads."""
    for name in config.method.rewards:
        field = row_formats.REWARD_FIELDS.get(name)
        is_given = field == "pattern" and config.method.reward_pattern is not None
        if field and field not in fields and not is_given:
            raise UserError(
                f"{file.path}:1: method.rewards.{name} reads the field {field}, but the rows have "
                f"only {', '.join(fields)}.{near(field, fields)} Use: data.columns.{field}=<field>,"
                " or your own function: '+method.rewards={<module>.<function>: 1.0}'."
            )
