"""The training and the held-out rows of a run, in the columns that a method's trainer reads."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from omegaconf import DictConfig

from recipes.common import tasks
from recipes.common.errors import UserError

Row = dict[str, Any]


def load(config: DictConfig) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of `config.data`, either possibly empty; `data.limit` cuts the training rows."""
    data = config.data
    train, heldout = {"reasoning": _reasoning, "jsonl": _jsonl, "hub": _hub}[data.kind](data)
    return train[: data.limit] if data.limit else train, heldout


def _reasoning(data: DictConfig) -> tuple[list[Row], list[Row]]:
    return tasks.generate(data)


def _jsonl(data: DictConfig) -> tuple[list[Row], list[Row]]:
    return (list(_lines(Path(data.path))) if data.path else []), (list(_lines(Path(data.heldout_path))) if data.heldout_path else [])


def _lines(path: Path) -> Iterator[Row]:
    """Rows of a JSON-lines file. The launcher has looked at its fields; here only what would crash is caught."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{path}:{number}: no JSON ({error.msg} at column {error.colno}).") from error


def _hub(data: DictConfig) -> tuple[list[Row], list[Row]]:
    def rows(split: str | None) -> list[Row]:
        return load_dataset(data.hub_id, revision=data.revision, split=split).to_list() if split else []

    return rows(data.split), rows(data.heldout_split)


def texts(rows: list[Row]) -> Iterator[str]:
    """Every text of the rows, for a tokenizer that is trained on the spot."""
    for row in rows:
        for column in ("text", "messages", "prompt", "completion", "chosen", "rejected"):
            value = row.get(column)
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                yield from (message["content"] for message in value)


def for_sft(rows: list[Row]) -> Dataset:
    """messages, text, or prompt and completion."""
    return _columns(rows, ("messages", "text", "prompt", "completion"))


def for_grpo(rows: list[Row]) -> Dataset:
    """prompt, and every other column for the rewards."""
    return Dataset.from_list([{key: value for key, value in row.items() if key != "completion"} for row in rows])


def for_dpo(rows: list[Row], seed: int) -> Dataset:
    """prompt, chosen, rejected. A generated problem is paired with the answer to another of its task."""
    if rows and "chosen" not in rows[0]:
        rng = random.Random(seed)
        rows = [
            {
                "prompt": row["prompt"],
                "chosen": row["completion"],
                "rejected": [{"role": "assistant", "content": tasks.wrong_answer(row, rng.sample(rows, min(50, len(rows))), rng)}],
            }
            for row in rows
        ]
    return _columns(rows, ("prompt", "chosen", "rejected"))


def _columns(rows: list[Row], wanted: tuple[str, ...]) -> Dataset:
    return Dataset.from_list([{key: row[key] for key in wanted if key in row} for row in rows])


def digest(rows: list[Row]) -> str:
    """sha256 of the rows, by which two runs show that they saw the same data."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
