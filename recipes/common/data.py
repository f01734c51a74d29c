"""The rows a run trains on and the ones it is measured on, from generated problems, local files or the hub."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset
from omegaconf import DictConfig

from recipes.common import tasks
from recipes.common.errors import UserError, near

Row = dict[str, Any]

# Method -> the sets of fields of which a row needs one (TRL's dataset formats).
FORMATS: dict[str, list[set[str]]] = {
    "sft": [{"prompt", "completion"}, {"messages"}, {"text"}],
    "dpo": [{"chosen", "rejected"}],
    "grpo": [{"prompt"}],
    "evaluate": [{"prompt", "answer"}],
}


def load_train(data: DictConfig, method: str) -> Dataset:
    """Rows to train on in the format of TRL's trainer for `method`, at most `data.limit` of them. Raises UserError."""
    if data.kind == "reasoning":
        rows = tasks.generate(data)[0]
    elif data.kind == "jsonl":
        rows = read_jsonl(_given(data.path, "data.path"), method)
    else:
        rows = _hub(data, data.split, method)
    rows = rows[: data.limit] if data.limit else rows
    if not rows:
        raise UserError(f"data={data.name} has no rows to train on.")
    if data.kind == "reasoning" and method == "dpo":
        rows = _pairs(rows, data.seed)
    return Dataset.from_list([_columns(row, method) for row in rows])


def load_heldout(data: DictConfig) -> list[Row]:
    """Rows with `prompt` and `answer` that are never trained on. Raises UserError where there are none."""
    if data.kind == "reasoning":
        rows = tasks.generate(data)[1]
    elif data.kind == "jsonl":
        rows = read_jsonl(_given(data.heldout_path, "data.heldout_path"), "evaluate")
    else:
        rows = _hub(data, _given(data.heldout_split, "data.heldout_split"), "evaluate")
    if not rows:
        raise UserError(f"data={data.name} has no held-out rows: set data.num_heldout, data.heldout_path or data.heldout_split.")
    return rows


def read_jsonl(path: str, method: str) -> list[Row]:
    """The rows of a local file. Raises UserError, with the line's number, for a line that is no JSON object or lacks a field."""
    file = Path(path)
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.jsonl")] if file.parent.is_dir() else []
        hint = near(file.name, siblings) if siblings else "Give the path of an existing file."
        raise UserError(f"data file {path}: there is no such file. {hint}")
    with file.open(encoding="utf-8") as lines:
        return [_row(line, f"{path}:{number}", method) for number, line in enumerate(lines, start=1) if line.strip()]


def texts(rows: Iterable[Row]) -> list[str]:
    """Everything a tokenizer of these rows has to spell: message contents and plain strings, in order."""
    found: list[str] = []
    for row in rows:
        for field in ("prompt", "completion", "chosen", "rejected", "messages", "text"):
            value = row.get(field, [])
            found += [value] if isinstance(value, str) else [message["content"] for message in value]
    return found


def _row(line: str, where: str, method: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}). Every line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__}, and every line must be one JSON object.")
    _check_fields(set(row), where, method)
    return row


def _check_fields(fields: set[str], where: str, method: str) -> None:
    if not any(form <= fields for form in FORMATS[method]):
        needed = ", or ".join(" and ".join(sorted(form)) for form in FORMATS[method])
        raise UserError(f"{where}: has the fields {', '.join(sorted(fields)) or '(none)'}, and {method} needs {needed}.")


def _hub(data: DictConfig, split: str, method: str) -> list[Row]:
    if data.hub_id is None or data.revision is None:
        raise UserError("data=hub needs data.hub_id and data.revision (a commit, so that the rows stay the same).")
    try:
        rows = datasets.load_dataset(data.hub_id, revision=data.revision, split=split).to_list()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"data set {data.hub_id} at {data.revision}, split {split}, could not be had: {error}") from error
    for row in rows[:1]:  # a table: all rows have the columns of the first
        _check_fields(set(row), f"{data.hub_id}, split {split}", method)
    return rows


def _pairs(problems: list[Row], seed: int) -> list[Row]:
    """Preference pairs: the right answer, and a wrong one that is right for another problem of the task."""
    rng = random.Random(seed)
    wrong = [tasks.wrong_answer(problem, problems, rng) for problem in problems]
    return [
        {**problem, "chosen": problem["completion"], "rejected": [{"role": "assistant", "content": answer}]}
        for problem, answer in zip(problems, wrong, strict=True)
    ]


def _columns(row: Row, method: str) -> Row:
    """What the trainer reads; for grpo everything but the right completion, because rewards may read any column."""
    if method == "grpo":
        return {key: value for key, value in row.items() if key != "completion"}
    kept = {"sft": ("prompt", "completion", "messages", "text"), "dpo": ("prompt", "chosen", "rejected")}[method]
    return {key: row[key] for key in kept if key in row}


def _given(value: str | None, name: str) -> str:
    if value is None:
        raise UserError(f"{name} is empty, and this data set needs it.")
    return value
