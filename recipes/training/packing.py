"""Turn the rows of one optimizer step into tensors, packed without padding or ordered by length.

Rows are reordered only within a step, so the rows of each step, the steps per epoch and the
schedule stay the same.
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
    """Collate rows {input_ids, labels} for SFT; with `packed`, into one row of documents.

    Return input_ids (rows, tokens), padded to `multiple`; targets (n); target_positions (n), the
    index in the flattened batch at which each is predicted; and num_tokens, without padding. With
    `packed` also return position_ids (1, tokens) and document_starts (documents + 1), as offsets.
    Attention is causal and padding follows the row, so no attention mask is needed.
    """

    pad_token_id: int
    packed: bool
    multiple: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids = [np.asarray(row["input_ids"]) for row in rows]
        labels = [np.array(row.get("labels", row["input_ids"])) for row in rows]
        num_tokens = sum(map(len, ids))
        lengths: list[int] = []  # a row may hold several documents, joined by packing
        for row, of_row in zip(rows, labels, strict=True):
            documents = row.get("seq_lengths", [len(of_row)])
            of_row[[0, *np.cumsum(documents)[:-1]]] = IGNORED
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

    `lengths` are those of the documents. Padding up to `filled` tokens becomes one more document.
    """
    rest = filled - sum(lengths)
    lengths = [*lengths, rest] if rest else lengths
    return {
        "position_ids": np.concatenate([np.arange(n) for n in lengths])[None],
        "document_starts": np.cumsum([0, *lengths], dtype=np.int32),
    }


class StepOrder(Sampler[int]):
    """Arrange the rows of each optimizer step, on all ranks, among its micro-batches by length.

    If `balanced`, micro-batches get similar numbers of tokens, which suits packed rows. Otherwise
    each gets rows of similar length, which suits padded rows. `lengths` are tokens by row; `size`
    rows make a micro-batch of one rank, and `number` micro-batches make a step of all ranks.
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
                yield from self._arranged(step)
                step = []
        yield from step  # an epoch's last step, if smaller, keeps its order

    def _arranged(self, rows: list[int]) -> list[int]:
        ordered = sorted(rows, key=lambda row: (-self.lengths[row], row))
        if not self.balanced:
            return ordered
        batches: list[list[int]] = [[] for _ in range(self.number)]
        tokens = [0] * self.number
        for row in ordered:  # longest first, each to the batch with the fewest tokens
            smallest = min(
                (n for n in range(self.number) if len(batches[n]) < self.size),
                key=tokens.__getitem__,
            )
            batches[smallest].append(row)
            tokens[smallest] += self.lengths[row]
        return [row for batch in batches for row in batch]


def arrange(loader: DataLoader, dataset: Dataset, size: int, number: int, balanced: bool) -> None:
    """Reorder the prepared `loader` of `dataset` by StepOrder."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate's wrapper, which splits it among ranks
        batches = batches.batch_sampler
    batches.sampler = StepOrder(batches.sampler, lengths(dataset), size, number, balanced)


def lengths(dataset: Dataset) -> np.ndarray:
    """Return the number of tokens of each row, (rows,); for a pair, its longer side's."""
    if "input_ids" in dataset.column_names:  # without labels if TRL has packed them
        tables = dataset.select_columns("input_ids").with_format("arrow").iter(10_000)
        return np.concatenate([pc.list_value_length(t["input_ids"]).to_numpy() for t in tables])
    return data_tokens.lengths(dataset)[0]
