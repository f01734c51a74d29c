"""Find the file and line of a row that tokenization rejects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from launch.core.json_lines import json_rows
from launch.core.row_check import conformed
from launch.core.row_columns import mapped
from recipes.data.data_load import GENERATED, hub_rows, separate_sources
from recipes.data.data_messages import RowError
from recipes.data.data_select import TEXT_FIELDS, Row


@dataclass(frozen=True)
class Located:
    """Call `make`, and start the message of a RowError with the row's file and line."""

    make: Callable[[Any], Any]
    data: DictConfig
    method: str

    def __call__(self, rows: Any) -> Any:
        try:
            return self.make(rows)
        except RowError as error:
            where = locate(self.data, self.method, error.messages)
            raise UserError(f"{where}: {error}") from error


def locate(data: DictConfig, method: str, messages: Any) -> str:
    """Return `file:line` of the row with these messages, or else the name of the data.

    A row contains them in one field, or in its prompt and an answer to it.
    """
    method = "samples" if data.kind == "samples" else method
    for where, row in itertools.chain.from_iterable(
        mapped(_located(source), source, method) for source in separate_sources(data) or [data]
    ):
        row = conformed(row, method)
        fields = [row.get(name) for name in TEXT_FIELDS]
        prompt = row.get("prompt")
        joined = [prompt + f for f in fields if isinstance(prompt, list) and isinstance(f, list)]
        if messages in fields or messages in joined:
            return where
    return f"data={data.name}"


def _located(data: DictConfig) -> Iterator[tuple[str, Row]]:
    """Yield all rows of a source, training and held-out, each with its place."""
    if data.kind == "hub":
        for split in filter(None, (data.split, data.heldout_split)):
            yield from hub_rows(data, split, data.streaming)
    elif data.kind not in GENERATED:
        for path in filter(None, (*data.get("files", [data.path]), data.heldout_path)):
            yield from json_rows(Path(path))
