"""Test the files of examples/, which the commands of docs/start/ read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import rewards
from recipes.data.data_load import load
from tests.helpers.data_rows import data_config

EXAMPLES = Path(__file__).parents[2] / "examples"
FITS = {"chat": ["sft"], "math": ["sft", "grpo"], "preferences": ["dpo"]}


@pytest.mark.parametrize(
    ("name", "method"), [(n, m) for n, methods in FITS.items() for m in methods]
)
def test_rows_load_for_their_methods(name, method):
    rows = load(data_config("jsonl", path=str(EXAMPLES / f"{name}.jsonl")), method).rows
    assert len(rows) == len({str(row) for row in rows}) == 8


def test_every_file_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.jsonl")} == set(FITS)


def test_rewards_judge_the_worked_answers():
    rows = [json.loads(line) for line in (EXAMPLES / "math.jsonl").open()]
    completions, answers = [row["completion"] for row in rows], [row["answer"] for row in rows]
    assert rewards.last_number(completions, answers) == [1.0] * len(rows)
    assert rewards.last_number(completions, answers[1:] + answers[:1]) == [0.0] * len(rows)
    assert rewards.brevity(completions) == [1.0] * len(rows)
    assert rewards.brevity(["x" * 400, ""]) == [0.5, 1.0]
