"""Test recipes/training/packing.py: collated batches, and the order of rows in a step."""

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import RandomSampler, SequentialSampler

from recipes.training.packing import IGNORED, Collator, StepOrder, lengths

PAD = 9
ROWS = [
    {"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]},
    {"input_ids": [4, 5], "labels": [4, 5]},
    {"input_ids": [6], "labels": [6]},
]


def test_collate_padded_rows():
    batch = Collator(PAD, packed=False)(ROWS)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, PAD], [6, PAD, PAD]]
    assert batch["targets"].tolist() == [2, 3, 5]
    assert batch["target_positions"].tolist() == [0, 1, 3]
    assert batch.keys() == {"input_ids", "targets", "target_positions", "num_tokens"}
    assert Collator(PAD, packed=False, multiple=4)(ROWS)["input_ids"].shape == (3, 4)
    assert batch["num_tokens"] == 6


def test_collate_packed_rows():
    batch = Collator(PAD, packed=True, multiple=4)(ROWS)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, PAD, PAD]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch["document_starts"].tolist() == [0, 3, 5, 6, 8]
    assert batch["document_starts"].dtype == torch.int32  # required by kernels
    assert batch["targets"].tolist() == [2, 3, 5]
    assert batch["target_positions"].tolist() == [0, 1, 3]
    assert batch["num_tokens"] == 6


def test_collate_rows_of_several_documents():
    joined = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}
    batch = Collator(PAD, packed=True)([joined, ROWS[1]])
    assert batch["document_starts"].tolist() == [0, 2, 5, 7]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert batch["targets"].tolist() == [2, 4, 5, 5]
    assert batch["target_positions"].tolist() == [0, 2, 3, 5]


def test_collator_does_not_change_rows():
    row = {"input_ids": np.array([1, 2]), "labels": np.array([1, 2])}
    Collator(PAD, packed=False)([row])
    assert row["labels"].tolist() == [1, 2]


SIZE, NUMBER = 3, 4  # rows of a micro-batch, micro-batches of a step of all ranks
LENGTHS = np.random.default_rng(0).integers(1, 100, 30)  # two complete steps, and one of six rows


def steps(rows):
    return [list(rows[n : n + SIZE * NUMBER]) for n in range(0, len(rows), SIZE * NUMBER)]


@pytest.mark.parametrize("balanced", [True, False])
def test_order_changes_only_within_steps(balanced):
    sampler, same_sampler = (
        RandomSampler(LENGTHS, generator=torch.Generator().manual_seed(0)) for _ in range(2)
    )
    order = StepOrder(sampler, LENGTHS, SIZE, NUMBER, balanced)
    assert len(order) == len(LENGTHS)
    epochs = []
    for _ in range(3):
        actual, drawn = list(order), list(same_sampler)
        assert [Counter(step) for step in steps(actual)] == [Counter(step) for step in steps(drawn)]
        assert steps(actual)[-1] == steps(drawn)[-1], "an incomplete step keeps its order"
        assert steps(actual)[0] != steps(drawn)[0]
        epochs.append(actual)
    assert epochs[0] != epochs[1]


def lengths_of_steps(balanced):
    """Return the rows' lengths of both complete steps, in the new order."""
    order = StepOrder(SequentialSampler(LENGTHS), LENGTHS, SIZE, NUMBER, balanced)
    return [LENGTHS[step] for step in steps(list(order))[:2]]


def test_grouped_rows_are_sorted_by_length():
    for tokens in lengths_of_steps(balanced=False):
        assert tokens.tolist() == sorted(tokens, reverse=True)


def test_balanced_micro_batches_have_similar_tokens():
    for tokens in lengths_of_steps(balanced=True):
        sums = tokens.reshape(NUMBER, SIZE).sum(axis=1)
        assert max(sums) < 1.1 * np.mean(sums)


def test_lengths_of_rows_and_pairs():
    rows = Dataset.from_list(
        [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1], "labels": [1]}]
    )
    assert lengths(rows).tolist() == [2, 1]
    assert lengths(rows.select([1, 0, 1])).tolist() == [1, 2, 1]
    pairs = [
        {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]},
        {"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [2]},
    ]
    assert lengths(Dataset.from_list(pairs)).tolist() == [3, 2]
