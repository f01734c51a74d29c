"""Make the same tokens and labels as TRL, but in batches and in several processes.

TRL 1.16 tokenizes text by text and makes four passes over the rows, which takes ten times longer.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from launch.core.row_messages import Row
from recipes.data.data_messages import RowError, render
from recipes.rank.program import say

IGNORED = -100  # label of tokens that the loss ignores
MASK_REMEDY = "Use: method.args.assistant_only_loss=true, which omits such turns."
BATCH = 1_000
ROWS_PER_PROCESS = 20_000  # tokenizing fewer is faster than starting a process
MEMORY_PER_PROCESS = 2**30  # bytes, for its batches and its copies of the parent's pages
REPORT_EVERY_S = 10.0

# `datasets` stops its workers by SIGTERM and waits for them. Workers forked from a rank inherit its
# handler, which only records the signal, so the wait could last forever.
multiprocess.context.ForkProcess.terminate = multiprocess.context.ForkProcess.kill

logger = logging.get_logger(__name__)
Batch = dict[str, Any]  # column -> a value for each row
Ids = list[list[int]]


@dataclass
class Progress:
    """Log progress, and touch the heartbeat file for the launcher's watchdog."""

    task: str
    heartbeat: Path
    reported_at: float = field(default_factory=time.monotonic)

    def __call__(self, done: int) -> None:
        self.heartbeat.touch()
        if time.monotonic() - self.reported_at > REPORT_EVERY_S:
            self.reported_at = time.monotonic()
            say(f"{self.task}: {done:,} rows")


def default_processes(rows: int) -> int:
    """Return how many processes to use for this number of rows and the free memory."""
    by_memory = psutil.virtual_memory().available // MEMORY_PER_PROCESS
    return max(1, min(len(os.sched_getaffinity(0)), rows // ROWS_PER_PROCESS, by_memory))


def map_rows(
    rows: Dataset,
    make: Callable[[Batch], Batch],
    drop: Collection[str],
    file: Path | None,
    progress: Progress,
    num_processes: int | None = None,
) -> Dataset:
    """Return `rows` with the columns `drop` replaced by those that `make` returns for each batch.

    The result is written to `file`, or stays in memory if `file` is None. Several processes write
    numbered files.
    """
    num_processes = num_processes or default_processes(len(rows))
    share = -(-len(rows) // num_processes)
    return rows.map(
        _with_progress,
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        fn_kwargs={"make": make, "progress": progress, "share": share, "processes": num_processes},
        num_proc=num_processes if num_processes > 1 else None,
        remove_columns=[name for name in rows.column_names if name in drop],
        cache_file_name=file and str(file),
        load_from_cache_file=False,
        # Nothing uses the fingerprint. Computing it would hash everything that `make` refers to.
        new_fingerprint=rows._fingerprint,
    )


def _with_progress(
    batch: Any,
    indices: list[int],
    make: Callable[[Batch], Batch],
    progress: Progress,
    share: int,
    processes: int,
) -> Batch:
    columns = make({name: batch[name] for name in batch})
    if indices[-1] < share:  # the first process reports progress, as if all were equally fast
        progress((indices[-1] + 1) * processes)
    else:
        progress.heartbeat.touch()
    return columns


@dataclass(frozen=True)
class Tokens:
    """Tokenize prompt and completion, messages or text to input_ids and labels, like SFTTrainer."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    text_field: str
    completion_only: bool
    assistant_only: bool

    def __call__(self, batch: Batch) -> Batch:
        tokenizer, rows = self.tokenizer, _rows(batch)
        end = tokenizer.eos_token
        if "prompt" in batch:
            texts = [row["prompt"] + _with_end(row["completion"], end) for row in rows]
        else:
            field = "messages" if "messages" in batch else self.text_field
            texts = [_with_end(text, end) for text in batch[field]]
        if self.assistant_only and isinstance(texts[0], list):
            tokens, labels = self._assistant_labels(texts, rows)
        else:
            in_loss = "completion" if "prompt" in batch and self.completion_only else "messages"
            _reject_weights(batch.get(in_loss, texts), MASK_REMEDY)
            tokens = labels = _ids(tokenizer, texts, rows, self.template)
        if "prompt" in batch and self.completion_only:
            prompts = _ids(tokenizer, batch["prompt"], rows, self.template, prompt=True)
            starts = [_prompt_length(tokenizer, *ids) for ids in zip(prompts, tokens, strict=True)]
            pairs = zip(starts, labels, strict=True)
            labels = [[IGNORED] * start + ids[start:] for start, ids in pairs]
        if "finished" in batch:
            special = set(tokenizer.all_special_ids)
            rows = [
                drop_end_token({**row, "input_ids": ids, "labels": row_labels}, special)
                for row, ids, row_labels in zip(rows, tokens, labels, strict=True)
            ]
            tokens, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
        return {"input_ids": tokens, "labels": labels}

    def _assistant_labels(self, texts: list[Any], rows: list[Row]) -> tuple[Ids, Ids]:
        """Return ids, and labels for the assistant's tokens only.

        Raises UserError if the template marks none in a row.
        """
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = render(self.tokenizer, texts, rows, True, chat_template=self.template, **options)
        labels = []
        for messages, row in zip(texts, encoded, strict=True):
            mask = _weighted(messages, row["assistant_masks"])
            if not any(mask):
                raise RowError(
                    messages,
                    "method.args.assistant_only_loss=true: the chat template marks no token to "
                    "learn. Use: data.chat_template=<file.jinja>, with {% generation %} around "
                    "each answer, and rows with an answer whose weight is not 0.",
                )
            pairs = zip(row["input_ids"], mask, strict=True)
            labels.append([token if is_answer else IGNORED for token, is_answer in pairs])
        return [row["input_ids"] for row in encoded], labels


@dataclass(frozen=True)
class PairTokens:
    """Tokenize preference pairs to prompt_ids, chosen_ids and rejected_ids, like DPOTrainer."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, batch: Batch) -> Batch:
        rows, end = _rows(batch), self.tokenizer.eos_token
        if "prompt" not in batch:
            rows = [{**row, **extract_prompt(row)} for row in rows]
        for side in ("chosen", "rejected"):
            _reject_weights([row[side] for row in rows], "Remove the row, or end it before.")
        prompts = _ids(self.tokenizer, [row["prompt"] for row in rows], rows, prompt=True)
        chosen, rejected = (
            _ids(self.tokenizer, [row["prompt"] + _with_end(row[side], end) for row in rows], rows)
            for side in ("chosen", "rejected")
        )
        starts = [
            min(_prompt_length(self.tokenizer, prompt, both) for both in sides)
            for prompt, *sides in zip(prompts, chosen, rejected, strict=True)
        ]
        return {
            "prompt_ids": [ids[:start] for start, ids in zip(starts, prompts, strict=True)],
            "chosen_ids": [ids[start:] for start, ids in zip(starts, chosen, strict=True)],
            "rejected_ids": [ids[start:] for start, ids in zip(starts, rejected, strict=True)],
        }


@dataclass(frozen=True)
class PromptTokens:
    """Tokenize prompts to prompt_ids, like GRPOTrainer, which passes a template only the prompt."""

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs

    def __call__(self, batch: Batch) -> Batch:
        ids = _ids(self.tokenizer, batch["prompt"], (), prompt=True, **self.options)
        return {"prompt_ids": ids}


def _rows(batch: Batch) -> list[Row]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _with_end(text: Any, end: str) -> Any:
    """Return a plain text with the end token. In messages, the chat template adds it."""
    return text if isinstance(text, list) or text.endswith(end) else text + end


def _weighted(messages: list[Row], mask: list[int]) -> list[int]:
    """Return the mask of the assistant's tokens without those of turns of weight 0.

    Raises RowError if the template does not mark each of the assistant's turns once.
    """
    weights = [turn.get("weight", 1) for turn in messages if turn["role"] == "assistant"]
    if all(weights):
        return mask
    bits = zip([0, *mask], mask, strict=False)
    turns = list(itertools.accumulate(bit and not before for before, bit in bits))
    if not turns or turns[-1] != len(weights):
        raise RowError(
            messages,
            f"has {len(weights)} turns of the assistant, some of weight 0, but the chat template "
            f"marks {turns[-1] if turns else 0} answers. Use: data.chat_template=<file.jinja>, "
            "with {% generation %} around each answer.",
        )
    return [bit if weights[turn - 1] else 0 for bit, turn in zip(mask, turns, strict=True)]


def _reject_weights(values: list[Any], remedy: str) -> None:
    """Raise RowError for a turn of weight 0, which would be learned like the others."""
    for messages in values:
        if isinstance(messages, list) and not all(turn.get("weight", 1) for turn in messages):
            problem = "has a turn of weight 0 (or train: false), which would be learned."
            raise RowError(messages, f"{problem} {remedy}")


def _ids(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[Any],
    rows: Sequence[Row],
    template: str | None = None,
    prompt: bool = False,
    **more: Any,
) -> Ids:
    """Return the token ids of texts or messages. If `prompt`, the assistant's turn follows."""
    if isinstance(texts[0], str):
        return _encoded(tokenizer, texts, True)
    options = {"chat_template": template, "add_generation_prompt": prompt, "tokenize": False}
    options |= more
    return _encoded(tokenizer, render(tokenizer, texts, rows, **options), False)


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> Ids:
    """Return the token ids of texts. If `special`, add the tokens that begin or end a text.

    Calling a fast tokenizer's backend without offsets takes a quarter less time.
    """
    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    # a slow tokenizer, or a subclass that overrides encoding
    if (kind.__call__, kind._encode_plus) != (fast.__call__, fast._encode_plus):
        encoded = tokenizer(texts, add_special_tokens=special, return_attention_mask=False)
        return encoded["input_ids"]
    tokenizer(texts[:1])  # sets truncation, padding and special tokens in the backend
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    return [encoding.ids for encoding in encoded]


def _prompt_length(tokenizer: PreTrainedTokenizerBase, prompt: list[int], both: list[int]) -> int:
    """Return the number of tokens that `prompt` shares with `both` (prompt and completion)."""
    length = common_prefix_length(prompt, both)
    if length < len(prompt):
        logger.warning_once(
            "The last tokens of a prompt change if the completion follows, so "
            f"{tokenizer.decode(prompt[length:])!r} is learned as part of the completion. End the "
            "prompt at a token boundary, or use a chat template that renders it identically with "
            "and without an answer."
        )
    return length


def drop_end_token(row: Row, special: Collection[int]) -> Row:
    """Return tokens and labels. If `finished` is False, drop the token that ends the completion.

    A model that learned the ends of truncated samples would stop anywhere. Sampled text has no
    special tokens, so the last special token is the end token that TRL or the chat template added.
    Raises UserError if there is no special token.
    """
    ids, labels = row["input_ids"], row["labels"]
    if row.get("finished") is not False:
        return {"input_ids": ids, "labels": labels}
    end = next(
        (n for n in reversed(range(len(ids))) if labels[n] != IGNORED and ids[n] in special), None
    )
    if end is None:
        raise UserError(
            "data: the chat template ends answers without a special token, so the end of rows with "
            "finished=false cannot be dropped. Remove these rows, or sample again with "
            "method.args.finished_only=true."
        )
    return {"input_ids": ids[:end], "labels": labels[:end]}


LENGTH_COLUMNS = ("labels", "prompt_ids", "chosen_ids", "rejected_ids")


def lengths(rows: Dataset) -> tuple[Any, Any]:
    """Return the number of tokens of each row and of its prompt, (rows,) each.

    A preference pair counts its longer side; GRPO's rows have only a prompt.
    """
    columns = rows.select_columns(
        [name for name in rows.column_names if name in LENGTH_COLUMNS]
    ).with_format("arrow")
    parts = [
        lengths_of_columns({name: table[name] for name in table.column_names})
        for table in columns.iter(10 * BATCH)
    ]
    tokens, prompt = (np.concatenate(part) for part in zip(*parts, strict=True))
    return tokens, prompt


def lengths_of_columns(columns: dict[str, Any]) -> tuple[Any, Any]:
    """Return the same as `lengths`, from columns that are lists or Arrow arrays of token ids."""
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
    in_loss = np.flatnonzero(pc.list_flatten(arrays["labels"]).to_numpy() != IGNORED)
    first = np.append(in_loss, tokens.sum())[np.searchsorted(in_loss, starts)]
    return tokens, np.minimum(first - starts, tokens)


def first_tokens(rows: Dataset, number: int) -> Dataset:
    """Return `rows` truncated to their first `number` tokens."""

    def truncate(table: pyarrow.Table) -> pyarrow.Table:
        for n, name in enumerate(table.column_names):
            if name in ("input_ids", "labels"):
                table = table.set_column(n, name, pc.list_slice(table[name], 0, number))
        return table

    return rows.with_format("arrow").map(truncate, batched=True).with_format(None)
