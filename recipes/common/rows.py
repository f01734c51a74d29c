"""The rows of one optimizer step as tensors: laid end to end without padding, or ordered so that little is padded.

Rows only change places within a step, so the rows of each step, the steps per epoch and the schedule stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler

IGNORED = -100  # the label of a token that is not a target


@dataclass
class Collator:
    """Collate rows {input_ids, labels} into a batch for SFT, filled to a multiple of tokens. With `packed`, into one row of documents.

    Returns input_ids (rows, tokens); targets (n) and target_positions (n), where in the flattened batch each is predicted;
    num_tokens, without padding. With `packed` also position_ids (1, tokens) and document_starts (documents + 1), as offsets.
    Attention is causal and padding follows the row, so no attention mask is needed.
    """

    pad_token_id: int
    packed: bool
    multiple: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids = [np.asarray(row["input_ids"]) for row in rows]
        labels = [np.array(row.get("labels", row["input_ids"])) for row in rows]
        for row, found in zip(rows, labels, strict=True):  # a row may hold several documents joined by packing
            starts = np.cumsum(row["seq_lengths"])[:-1] if "seq_lengths" in row else []
            found[[0, *starts]] = IGNORED
        lengths = [n for row, found in zip(rows, ids, strict=True) for n in row.get("seq_lengths", [len(found)])]
        longest = sum(lengths) if self.packed else max(map(len, ids))
        longest = -(-longest // self.multiple) * self.multiple
        joined, marked = ([np.concatenate(part)] for part in (ids, labels)) if self.packed else (ids, labels)
        filled = np.full((len(joined), longest), self.pad_token_id)
        wanted = np.full((len(joined), longest + 1), IGNORED)
        for n, (row, label) in enumerate(zip(joined, marked, strict=True)):
            filled[n, : len(row)], wanted[n, : len(row)] = row, label
        wanted = wanted[:, 1:].reshape(-1)
        at = np.flatnonzero(wanted != IGNORED)
        batch = {"input_ids": filled, "targets": wanted[at], "target_positions": at}
        if self.packed:
            batch |= boundaries(lengths, longest)
        return {**{name: torch.from_numpy(found) for name, found in batch.items()}, "num_tokens": sum(map(len, ids))}


def boundaries(lengths: Sequence[int], filled: int) -> dict[str, np.ndarray]:
    """Return position_ids (1, filled) and document_starts (documents + 1) of documents laid end to end.

    `lengths` are those of the documents. Padding up to `filled` tokens counts as one more document.
    """
    rest = filled - sum(lengths)
    lengths = [*lengths, rest] if rest else lengths
    return {
        "position_ids": np.concatenate([np.arange(n) for n in lengths])[None],
        "document_starts": np.cumsum([0, *lengths], dtype=np.int32),
    }


class StepOrder(Sampler[int]):
    """The order of `sampler`, with the rows of each optimizer step, on all ranks, arranged among its micro-batches by length.

    `balanced`: micro-batches get similar numbers of tokens, for packed rows; otherwise neighbours have similar length, for padded rows.
    `lengths` in tokens, by row; `size` rows make a micro-batch of one rank, `number` micro-batches a step of all ranks.
    """

    def __init__(self, sampler: Sampler[int], lengths: np.ndarray, size: int, number: int, balanced: bool) -> None:
        self.sampler, self.lengths, self.size, self.number, self.balanced = sampler, lengths, size, number, balanced

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        step: list[int] = []
        for row in self.sampler:
            step.append(row)
            if len(step) == self.size * self.number:
                yield from self._arranged(step)
                step = []
        yield from step  # an epoch's last, smaller step keeps its order

    def _arranged(self, rows: list[int]) -> list[int]:
        ordered = sorted(rows, key=lambda row: (-self.lengths[row], row))
        if not self.balanced:
            return ordered
        batches: list[list[int]] = [[] for _ in range(self.number)]
        tokens = [0] * self.number
        for row in ordered:  # longest first, each to the batch with the fewest tokens
            smallest = min((n for n in range(self.number) if len(batches[n]) < self.size), key=tokens.__getitem__)
            batches[smallest].append(row)
            tokens[smallest] += self.lengths[row]
        return [row for batch in batches for row in batch]


def arrange(loader: DataLoader, dataset: Dataset, size: int, number: int, balanced: bool) -> None:
    """Reorder the prepared `loader` of `dataset` by StepOrder."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate wraps it to give each rank its part
        batches = batches.batch_sampler
    batches.sampler = StepOrder(batches.sampler, lengths(dataset), size, number, balanced)


def lengths(dataset: Dataset) -> np.ndarray:
    """Return the tokens of each row, (rows,); for a pair, those of its longer side."""
    columns = [name for name in ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids") if name in dataset.column_names]
    found = {name: [] for name in columns}
    for table in dataset.select_columns(columns).with_format("arrow").iter(10_000):
        for name in columns:
            found[name].append(pc.list_value_length(table[name]).to_numpy())
    tokens = {name: np.concatenate(parts) for name, parts in found.items()}
    if "input_ids" in tokens:
        return tokens["input_ids"]
    return tokens["prompt_ids"] + np.maximum(tokens["chosen_ids"], tokens["rejected_ids"])
