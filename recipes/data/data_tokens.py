"""Make the same tokens and labels as TRL, but in batches and in several processes.

TRL 1.16 calls the tokenizer once for each text and passes over all rows four times, which takes ten
times longer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
import psutil
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging
from trl.data_utils import common_prefix_length, extract_prompt

from launch.core.errors import UserError
from recipes.data.data_select import TEMPLATE_FIELDS, Row
from recipes.rank.program import say

IGNORED = -100  # the label of a token that does not count in the loss
BATCH = 1_000
ROWS_PER_PROCESS = 20_000  # tokenizing fewer takes no longer than starting a process
MEMORY_PER_PROCESS = 2**30  # bytes, for its batches and its copies of the parent's pages
REPORT_EVERY_S = 10.0

# The pool of `datasets` stops its workers by SIGTERM and waits for them. Workers forked by a rank
# inherit its handler, which only records the signal, so the pool could wait forever.
multiprocess.context.ForkProcess.terminate = multiprocess.context.ForkProcess.kill

logger = logging.get_logger(__name__)
Batch = dict[str, Any]  # column -> a value for each row
Ids = list[list[int]]


@dataclass
class Progress:
    """Touch the heartbeat for the launcher's watchdog during work on rows, and log progress."""

    what: str
    heartbeat: Path
    reported_at: float = field(default_factory=time.monotonic)

    def __call__(self, done: int) -> None:
        self.heartbeat.touch()
        if time.monotonic() - self.reported_at > REPORT_EVERY_S:
            self.reported_at = time.monotonic()
            say(f"{self.what}: {done:,} rows")


def processes(rows: int) -> int:
    """Return the number of processes to use: one if rows are few or memory is short."""
    by_memory = psutil.virtual_memory().available // MEMORY_PER_PROCESS
    return max(1, min(len(os.sched_getaffinity(0)), rows // ROWS_PER_PROCESS, by_memory))


def mapped(
    rows: Dataset,
    make: Callable[[Batch], Batch],
    drop: Collection[str],
    file: Path | None,
    progress: Progress,
    number: int | None = None,
) -> Dataset:
    """Return `rows` without the columns `drop`, and with the columns that `make` returns per batch.

    Without `file` the result stays in memory. Several processes write one file each, with a number
    in its name.
    """
    number = number or processes(len(rows))
    first = -(-len(rows) // number)
    return rows.map(
        _with_progress,
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        fn_kwargs={"make": make, "progress": progress, "first": first, "number": number},
        num_proc=number if number > 1 else None,
        remove_columns=[name for name in rows.column_names if name in drop],
        cache_file_name=file and str(file),
        load_from_cache_file=False,
        # The fingerprint is not used; computing one would hash everything that `make` refers to.
        new_fingerprint=rows._fingerprint,
    )


def _with_progress(
    batch: Any,
    indices: list[int],
    make: Callable[[Batch], Batch],
    progress: Progress,
    first: int,
    number: int,
) -> Batch:
    columns = make({name: batch[name] for name in batch})
    if indices[-1] < first:  # the first process reports progress, assuming all are equally fast
        progress((indices[-1] + 1) * number)
    else:
        progress.heartbeat.touch()
    return columns


@dataclass(frozen=True)
class Tokens:
    """Make input_ids and labels of prompt and completion, messages or text, as SFTTrainer does."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    text_field: str
    completion_only: bool
    assistant_only: bool

    def __call__(self, batch: Batch) -> Batch:
        tokenizer, rows = self.tokenizer, _rows(batch)
        end = tokenizer.eos_token
        if "prompt" in batch:
            texts = [row["prompt"] + _ended(row["completion"], end) for row in rows]
        else:
            field = "messages" if "messages" in batch else self.text_field
            texts = [_ended(text, end) for text in batch[field]]
        if self.assistant_only and isinstance(texts[0], list):
            tokens, labels = self._turns(texts, rows)
        else:
            tokens = labels = _ids(tokenizer, texts, rows, self.template)
        if "prompt" in batch and self.completion_only:
            prompts = _ids(tokenizer, batch["prompt"], rows, self.template, prompt=True)
            starts = [_prompt_length(tokenizer, *ids) for ids in zip(prompts, tokens, strict=True)]
            pairs = zip(starts, labels, strict=True)
            labels = [[IGNORED] * start + ids[start:] for start, ids in pairs]
        if "finished" in batch:
            special = set(tokenizer.all_special_ids)
            rows = [
                without_end({**row, "input_ids": ids, "labels": kind}, special)
                for row, ids, kind in zip(rows, tokens, labels, strict=True)
            ]
            tokens, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
        return {"input_ids": tokens, "labels": labels}

    def _turns(self, texts: list[Any], rows: list[Row]) -> tuple[Ids, Ids]:
        """Return ids and labels, with labels only for text of the assistant.

        Raises UserError if the template does not mark any.
        """
        encoded = [
            self.tokenizer.apply_chat_template(
                text,
                chat_template=self.template,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **_options(row),
            )
            for text, row in zip(texts, rows, strict=True)
        ]
        if not all(1 in each["assistant_masks"] for each in encoded):
            raise UserError(
                "method.args.assistant_only_loss=true: the chat template marks no token of a row "
                "as the assistant's. Give a template whose {% generation %} encloses each answer, "
                "by data.chat_template=<file.jinja>."
            )
        pairs = [zip(each["input_ids"], each["assistant_masks"], strict=True) for each in encoded]
        return [each["input_ids"] for each in encoded], [
            [token if counts else IGNORED for token, counts in pair] for pair in pairs
        ]


@dataclass(frozen=True)
class PairTokens:
    """Make prompt_ids, chosen_ids and rejected_ids of preference pairs, as DPOTrainer does."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, batch: Batch) -> Batch:
        rows, end = _rows(batch), self.tokenizer.eos_token
        if "prompt" not in batch:
            rows = [{**row, **extract_prompt(row)} for row in rows]
        prompts = _ids(self.tokenizer, [row["prompt"] for row in rows], rows, prompt=True)
        chosen, rejected = (
            _ids(self.tokenizer, [row["prompt"] + _ended(row[side], end) for row in rows], rows)
            for side in ("chosen", "rejected")
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
    """Make prompt_ids as GRPOTrainer does, which passes only the prompt to a template."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, batch: Batch) -> Batch:
        prompts = batch["prompt"]
        return {"prompt_ids": _ids(self.tokenizer, prompts, [{}] * len(prompts), prompt=True)}


def _rows(batch: Batch) -> list[Row]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _ended(text: Any, end: str) -> Any:
    """Return a plain text with the end token; a template adds it to messages."""
    return text if isinstance(text, list) or text.endswith(end) else text + end


def _options(row: Row) -> dict[str, Any]:
    """Return the arguments that a chat template gets from a row besides its messages."""
    tools = row.get("tools")
    return {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }


def _ids(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[Any],
    rows: list[Row],
    template: str | None = None,
    prompt: bool = False,
) -> Ids:
    """Return the ids of plain texts or messages. With `prompt`, open the assistant's turn."""
    if isinstance(texts[0], str):
        return _encoded(tokenizer, texts, True)
    options = {"chat_template": template, "add_generation_prompt": prompt, "tokenize": False}
    if any(row.get(name) is not None for row in rows for name in TEMPLATE_FIELDS):
        written = [
            tokenizer.apply_chat_template(text, **options, **_options(row))
            for text, row in zip(texts, rows, strict=True)
        ]
    else:  # rendering all at once takes three quarters of the time
        written = tokenizer.apply_chat_template(texts, **options)
    return _encoded(tokenizer, written, False)


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> Ids:
    """Return the ids of texts, if `special` with the tokens that begin or end a text.

    A fast tokenizer's backend is called without offsets, which takes three quarters of the time.
    """
    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    if (kind.__call__, kind._encode_plus) != (fast.__call__, fast._encode_plus):  # not fast
        encoded = tokenizer(texts, add_special_tokens=special, return_attention_mask=False)
        return encoded["input_ids"]
    tokenizer(texts[:1])  # sets truncation, padding and special tokens in the backend
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    return [each.ids for each in encoded]


def _prompt_length(tokenizer: PreTrainedTokenizerBase, prompt: list[int], whole: list[int]) -> int:
    """Return the number of tokens before the completion, which starts where the two differ."""
    length = common_prefix_length(prompt, whole)
    if length < len(prompt):
        logger.warning_once(
            "The tokens of a prompt are not the first of prompt and completion: "
            f"{tokenizer.decode(prompt[length:])!r} is trained on as part of the completion. End "
            "the prompt at a token boundary, or use a chat template that renders it identically "
            "with and without an answer."
        )
    return length


def without_end(row: Row, special: Collection[int]) -> Row:
    """Return tokens and labels; if `finished` is False, without the token that ends the completion.

    Trained on ends of truncated samples, a model would learn to stop anywhere. Sampled text has
    no special tokens, so the last one is the end token that TRL or the chat template has added.
    Raises UserError if there is none.
    """
    ids, labels = row["input_ids"], row["labels"]
    if row.get("finished") is not False:
        return {"input_ids": ids, "labels": labels}
    end = next(
        (n for n in reversed(range(len(ids))) if labels[n] != IGNORED and ids[n] in special), None
    )
    if end is None:
        raise UserError(
            "a row with finished=false: the chat template ends answers without a special token, "
            "so the end cannot be left out. Use: method.args.finished_only=true for the samples, "
            "or "
            "rows without it."
        )
    return {"input_ids": ids[:end], "labels": labels[:end]}


LENGTH_COLUMNS = ("labels", "prompt_ids", "chosen_ids", "rejected_ids")


def lengths(rows: Dataset) -> tuple[Any, Any]:
    """Return the number of tokens in each row, and in its prompt, (rows,) each.

    A pair counts its longer side, a row of GRPO only its prompt.
    """
    columns = rows.select_columns(
        [name for name in rows.column_names if name in LENGTH_COLUMNS]
    ).with_format("arrow")
    parts = [
        lengths_of({name: table[name] for name in table.column_names})
        for table in columns.iter(10 * BATCH)
    ]
    tokens, prompt = (np.concatenate(part) for part in zip(*parts, strict=True))
    return tokens, prompt


def lengths_of(columns: dict[str, Any]) -> tuple[Any, Any]:
    """Return lengths as `lengths` does, from LENGTH_COLUMNS as lists or arrays of lists."""
    arrays = {
        name: pyarrow.chunked_array([ids]) if isinstance(ids, list) else ids
        for name, ids in columns.items()
    }
    number = {
        name: pc.list_value_length(ids).to_numpy().astype(np.int64) for name, ids in arrays.items()
    }
    if "labels" not in number:
        answers = [number[side] for side in ("chosen_ids", "rejected_ids") if side in number]
        return number["prompt_ids"] + np.max(answers or [0], axis=0), number["prompt_ids"]
    tokens = number["labels"]
    starts = np.cumsum(tokens) - tokens
    counted = np.flatnonzero(pc.list_flatten(arrays["labels"]).to_numpy() != IGNORED)
    first = np.append(counted, tokens.sum())[np.searchsorted(counted, starts)]
    return tokens, np.minimum(first - starts, tokens)


def first_tokens(rows: Dataset, number: int) -> Dataset:
    """Return `rows` cut to their first `number` tokens."""

    def cut(table: pyarrow.Table) -> pyarrow.Table:
        for n, name in enumerate(table.column_names):
            if name in ("input_ids", "labels"):
                table = table.set_column(n, name, pc.list_slice(table[name], 0, number))
        return table

    return rows.with_format("arrow").map(cut, batched=True).with_format(None)
