"""Tokens and labels of rows, a batch at a time and by several processes: those that TRL's trainers make of one row after another.

TRL 1.16 calls the tokenizer for each text by itself and passes over all rows four times, which takes ten times as long.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from trl.data_utils import common_prefix_length, extract_prompt

from recipes.common.data_select import Row
from recipes.common.errors import UserError
from recipes.common.program import say

IGNORED = -100  # the label of a token that does not count in the loss
BATCH = 1_000
ROWS_PER_PROCESS = 20_000  # fewer are tokenized in about the time that a process takes to start
MEMORY_PER_PROCESS = 2**30  # bytes: its batches, and what it has copied of the process that it was forked from
SAID_EVERY_S = 10.0

logger = logging.get_logger(__name__)
Batch = dict[str, Any]  # column -> a value for each row
Ids = list[list[int]]


@dataclass
class Progress:
    """Beats for the launcher's watchdog while rows are worked on, and says now and then how many are done."""

    what: str
    heartbeat: Path
    said: float = field(default_factory=time.monotonic)

    def __call__(self, done: int) -> None:
        self.heartbeat.touch()
        if time.monotonic() - self.said > SAID_EVERY_S:
            self.said = time.monotonic()
            say(f"{self.what}: {done:,} rows")


def processes(rows: int) -> int:
    """How many to work on `rows` rows with: one where these are few or memory is short."""
    by_memory = psutil.virtual_memory().available // MEMORY_PER_PROCESS
    return max(1, min(len(os.sched_getaffinity(0)), rows // ROWS_PER_PROCESS, by_memory))


def mapped(
    rows: Dataset, make: Callable[[Batch], Batch], drop: Collection[str], file: Path | None, progress: Progress, number: int | None = None
) -> Dataset:
    """`rows` without the columns `drop` and with what `make` makes of a batch, by `number` processes.

    They are written as `file`, of several processes as one file each with a number in its name; without `file` they stay in memory.
    """
    number = number or processes(len(rows))
    return rows.map(
        _followed,
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        fn_kwargs={"make": make, "progress": progress, "first": -(-len(rows) // number), "number": number},
        num_proc=number if number > 1 else None,
        remove_columns=[name for name in rows.column_names if name in drop],
        cache_file_name=file and str(file),
        load_from_cache_file=False,
        new_fingerprint=rows._fingerprint,  # nothing reads it; else all that `make` refers to would be hashed
    )


def _followed(batch: Any, indices: list[int], make: Callable[[Batch], Batch], progress: Progress, first: int, number: int) -> Batch:
    made = make({name: batch[name] for name in batch})
    if indices[-1] < first:  # the first of the processes speaks for all
        progress((indices[-1] + 1) * number)
    else:
        progress.heartbeat.touch()
    return made


@dataclass(frozen=True)
class Tokens:
    """A batch of rows of prompt and completion, messages or text -> input_ids and labels, as SFTTrainer._prepare_dataset has them."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    text_field: str
    completion_only: bool
    assistant_only: bool

    def __call__(self, batch: Batch) -> Batch:
        rows, end = _rows(batch), self.tokenizer.eos_token
        if "prompt" in batch:
            texts = [row["prompt"] + _ended(row["completion"], end) for row in rows]
        else:
            texts = [_ended(text, end) for text in batch["messages" if "messages" in batch else self.text_field]]
        if self.assistant_only and isinstance(texts[0], list):
            tokens, labels = self._turns(texts, rows)
        else:
            tokens = labels = _ids(self.tokenizer, texts, rows, self.template)
        if "prompt" in batch and self.completion_only:
            prompts = _ids(self.tokenizer, batch["prompt"], rows, self.template, prompt=True)
            starts = [_prompt_length(self.tokenizer, *each) for each in zip(prompts, tokens, strict=True)]
            labels = [[IGNORED] * start + each[start:] for start, each in zip(starts, labels, strict=True)]
        if "finished" in batch:
            special = set(self.tokenizer.all_special_ids)
            made = [without_end({**row, "input_ids": a, "labels": b}, special) for row, a, b in zip(rows, tokens, labels, strict=True)]
            tokens, labels = [each["input_ids"] for each in made], [each["labels"] for each in made]
        return {"input_ids": tokens, "labels": labels}

    def _turns(self, texts: list[Any], rows: list[Row]) -> tuple[Ids, Ids]:
        """Tokens of messages, and labels of those that an assistant has written. Raises UserError where the template marks none."""
        options = {"chat_template": self.template, "return_dict": True, "return_assistant_tokens_mask": True}
        found = [self.tokenizer.apply_chat_template(text, **options, **_options(row)) for text, row in zip(texts, rows, strict=True)]
        if not all(1 in each["assistant_masks"] for each in found):
            raise UserError(
                "method.args.assistant_only_loss=true: the chat template marks no token of a row as the assistant's. "
                "Give a template whose {% generation %} encloses each answer, by data.chat_template=<file.jinja>."
            )
        pairs = [zip(each["input_ids"], each["assistant_masks"], strict=True) for each in found]
        return [each["input_ids"] for each in found], [[token if counts else IGNORED for token, counts in pair] for pair in pairs]


@dataclass(frozen=True)
class PairTokens:
    """A batch of preference pairs -> prompt_ids, chosen_ids and rejected_ids, as DPOTrainer._prepare_dataset has them."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, batch: Batch) -> Batch:
        rows, end = _rows(batch), self.tokenizer.eos_token
        if "prompt" not in batch:
            rows = [{**row, **extract_prompt(row)} for row in rows]
        prompts = _ids(self.tokenizer, [row["prompt"] for row in rows], rows, prompt=True)
        chosen, rejected = (
            _ids(self.tokenizer, [row["prompt"] + _ended(row[side], end) for row in rows], rows) for side in ("chosen", "rejected")
        )
        starts = [
            min(_prompt_length(self.tokenizer, prompt, whole) for whole in sides)
            for prompt, *sides in zip(prompts, chosen, rejected, strict=True)
        ]
        return {
            "prompt_ids": [each[:start] for start, each in zip(starts, prompts, strict=True)],
            "chosen_ids": [each[start:] for start, each in zip(starts, chosen, strict=True)],
            "rejected_ids": [each[start:] for start, each in zip(starts, rejected, strict=True)],
        }


@dataclass(frozen=True)
class PromptTokens:
    """A batch of prompts -> prompt_ids, as GRPOTrainer makes them: it gives a template nothing else of a row."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, batch: Batch) -> Batch:
        return {"prompt_ids": _ids(self.tokenizer, batch["prompt"], [{}] * len(batch["prompt"]), prompt=True)}


def _rows(batch: Batch) -> list[Row]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _ended(text: Any, end: str) -> Any:
    """A plain text with the token that ends it; a template ends messages."""
    return text if isinstance(text, list) or text.endswith(end) else text + end


def _options(row: Row) -> dict[str, Any]:
    """What a chat template is given of a row beside its messages."""
    tools = row.get("tools")
    return {"tools": json.loads(tools) if isinstance(tools, str) else tools, **(row.get("chat_template_kwargs") or {})}


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[Any], rows: list[Row], template: str | None = None, prompt: bool = False) -> Ids:
    """Tokens of plain texts, or of messages, whose `prompt` leaves the next turn to the assistant."""
    if isinstance(texts[0], str):
        return tokenizer(texts, return_attention_mask=False)["input_ids"]
    options = {"chat_template": template, "add_generation_prompt": prompt, "tokenize": False}
    written = [tokenizer.apply_chat_template(text, **options, **_options(row)) for text, row in zip(texts, rows, strict=True)]
    return tokenizer(written, add_special_tokens=False, return_attention_mask=False)["input_ids"]


def _prompt_length(tokenizer: PreTrainedTokenizerBase, prompt: list[int], whole: list[int]) -> int:
    """Tokens before the completion: it starts where prompt and whole differ, also where that is inside the prompt."""
    length = common_prefix_length(prompt, whole)
    if length < len(prompt):
        logger.warning_once(
            f"The tokens of a prompt are not the first of prompt and completion: {tokenizer.decode(prompt[length:])!r} is trained on with "
            "the completion. Let a prompt end where a token does, or use a chat template that writes it alike with and without an answer."
        )
    return length


def without_end(row: Row, special: Collection[int]) -> Row:
    """Tokens and labels of a row; where `finished` is False, up to the special token that ends its completion, and without that.

    A sample that was cut off goes on, and a model that is trained on its end learns to stop anywhere. What was sampled holds no special
    tokens, so that the last one is the end that TRL, or the chat template, has written. Raises UserError where they write none.
    """
    ids, labels = row["input_ids"], row["labels"]
    if row.get("finished") is not False:
        return {"input_ids": ids, "labels": labels}
    end = next((n for n in reversed(range(len(ids))) if labels[n] != IGNORED and ids[n] in special), None)
    if end is None:
        raise UserError(
            "a row with finished=false: the chat template ends an answer with no special token, so its end cannot be left out. "
            "Use: method.args.finished_only=true for the samples, or rows without it."
        )
    return {"input_ids": ids[:end], "labels": labels[:end]}


LENGTH_COLUMNS = ("labels", "prompt_ids", "chosen_ids", "rejected_ids")


def lengths(rows: Dataset) -> tuple[Any, Any]:
    """(tokens, tokens of the prompt) of each row: of a pair with the longer side, of GRPO the prompt alone."""
    columns = rows.select_columns([name for name in rows.column_names if name in LENGTH_COLUMNS]).with_format("arrow")
    found = [lengths_of({name: table[name] for name in table.column_names}) for table in columns.iter(10 * BATCH)]
    tokens, prompt = (np.concatenate(part) for part in zip(*found, strict=True))
    return tokens, prompt


def lengths_of(columns: dict[str, Any]) -> tuple[Any, Any]:
    """The same of the LENGTH_COLUMNS of some rows, each a list or an array of lists."""
    arrays = {name: pyarrow.chunked_array([ids]) if isinstance(ids, list) else ids for name, ids in columns.items()}
    number = {name: pc.list_value_length(ids).to_numpy().astype(np.int64) for name, ids in arrays.items()}
    if "labels" not in number:
        answers = [number[side] for side in ("chosen_ids", "rejected_ids") if side in number]
        return number["prompt_ids"] + np.max(answers or [0], axis=0), number["prompt_ids"]
    tokens = number["labels"]
    starts = np.cumsum(tokens) - tokens
    counted = np.flatnonzero(pc.list_flatten(arrays["labels"]).to_numpy() != IGNORED)
    first = np.append(counted, tokens.sum())[np.searchsorted(counted, starts)]
    return tokens, np.minimum(first - starts, tokens)


def first_tokens(rows: Dataset, number: int) -> Dataset:
    """`rows` cut to so many tokens."""
    return rows.with_format("arrow").map(_first_tokens, fn_kwargs={"number": number}, batched=True).with_format(None)


def _first_tokens(table: pyarrow.Table, number: int) -> pyarrow.Table:
    for n, name in enumerate(table.column_names):
        if name in ("input_ids", "labels"):
            table = table.set_column(n, name, pc.list_slice(table[name], 0, number))
    return table
