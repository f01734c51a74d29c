"""Collate rows without padding (packed), and order the rows of a step by length.

Rows are reordered only within a step, so each step has the same rows as without this module.
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

from recipes.data import data_tokens
from recipes.data.data_tokens import IGNORED


@dataclass
class Collator:
    """Collate rows {input_ids, labels} for SFT. With `packed`, join them into one row of documents.

    A batch has these entries:

    - input_ids (rows, tokens), where the number of tokens is a multiple of `multiple`
    - targets (n)
    - target_positions (n), the indices in the flattened batch where targets are predicted
    - num_tokens, an integer without padding
    - with `packed`: position_ids (1, tokens), and document_starts (documents + 1) as offsets

    No attention mask is needed, because attention is causal and padding is at the end.
    """

    pad_token_id: int
    packed: bool
    multiple: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids = [np.asarray(row["input_ids"]) for row in rows]
        labels = [np.array(row.get("labels", row["input_ids"])) for row in rows]
        num_tokens = sum(map(len, ids))
        lengths: list[int] = []  # TRL's packing joins several documents in a row
        for row, row_labels in zip(rows, labels, strict=True):
            documents = row.get("seq_lengths", [len(row_labels)])
            row_labels[[0, *np.cumsum(documents)[:-1]]] = IGNORED
            lengths += documents
        if self.packed:
            ids, labels = [np.concatenate(ids)], [np.concatenate(labels)]
        longest = -(-max(map(len, ids)) // self.multiple) * self.multiple
        filled = np.full((len(ids), longest), self.pad_token_id)
        labels_filled = np.full((len(ids), longest + 1), IGNORED)
        for n, (row_ids, label) in enumerate(zip(ids, labels, strict=True)):
            filled[n, : len(row_ids)], labels_filled[n, : len(row_ids)] = row_ids, label
        labels_filled = labels_filled[:, 1:].reshape(-1)
        positions = np.flatnonzero(labels_filled != IGNORED)
        batch = {
            "input_ids": filled,
            "targets": labels_filled[positions],
            "target_positions": positions,
        }
        if self.packed:
            batch |= boundaries(lengths, longest)
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        return {**tensors, "num_tokens": num_tokens}


def boundaries(lengths: Sequence[int], filled: int) -> dict[str, np.ndarray]:
    """Return position_ids (1, filled) and document_starts (documents + 1) of packed documents.

    `lengths` are the documents' lengths in tokens. Padding to `filled` tokens is the last document.
    """
    rest = filled - sum(lengths)
    lengths = [*lengths, rest] if rest else lengths
    return {
        "position_ids": np.concatenate([np.arange(n) for n in lengths])[None],
        "document_starts": np.cumsum([0, *lengths], dtype=np.int32),
    }


class StepOrder(Sampler[int]):
    """Distribute the rows of each optimizer step among its micro-batches by length.

    If `balanced`, micro-batches have similar numbers of tokens, which is best for packed rows.
    Otherwise each has rows of similar lengths, which is best for padded rows. `lengths` has the
    tokens of each row. A micro-batch has `size` rows, and a step has `number` micro-batches on all
    ranks.
    """

    def __init__(
        self, sampler: Sampler[int], lengths: np.ndarray, size: int, number: int, balanced: bool
    ) -> None:
        self.sampler, self.lengths = sampler, lengths
        self.size, self.number, self.balanced = size, number, balanced

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
                yield from self._ordered(step)
                step = []
        yield from step  # do not reorder an incomplete last step

    def _ordered(self, rows: list[int]) -> list[int]:
        ordered = sorted(rows, key=lambda row: (-self.lengths[row], row))
        if not self.balanced:
            return ordered
        batches: list[list[int]] = [[] for _ in range(self.number)]
        tokens = [0] * self.number
        for row in ordered:  # longest first, into the batch with the fewest tokens
            smallest = min(
                (n for n in range(self.number) if len(batches[n]) < self.size),
                key=tokens.__getitem__,
            )
            batches[smallest].append(row)
            tokens[smallest] += self.lengths[row]
        return [row for batch in batches for row in batch]


def arrange(loader: DataLoader, dataset: Dataset, size: int, number: int, balanced: bool) -> None:
    """Make the data loader of `dataset` use StepOrder."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # a wrapper of accelerate
        batches = batches.batch_sampler
    batches.sampler = StepOrder(batches.sampler, lengths(dataset), size, number, balanced)


def lengths(dataset: Dataset) -> np.ndarray:
    """Return the number of tokens of each row (rows,), or of the longer side of a pair."""
    if "input_ids" in dataset.column_names:  # rows for SFT
        tables = dataset.select_columns("input_ids").with_format("arrow").iter(10_000)
        return np.concatenate([pc.list_value_length(t["input_ids"]).to_numpy() for t in tables])
    return data_tokens.lengths(dataset)[0]
