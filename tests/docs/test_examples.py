"""Test the files of examples/, which the commands of docs/start/ read."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from examples import rewards
from launch.config.request import Request
from launch.machine import placement
from launch.plan.planning import prepare
from recipes.data.data_load import load
from tests.conftest import composed
from tests.helpers.data_rows import data_config

EXAMPLES = Path(__file__).parents[2] / "examples"
FITS = {
    "chat": ["sft"],
    "math": ["sft", "grpo"],
    "preferences": ["dpo"],
    "questions": ["sft", "grpo"],
}
COLUMNS = {
    ("questions", "sft"): {"prompt": "question", "completion": "answer"},
    ("questions", "grpo"): {"prompt": "question"},
}


@pytest.mark.parametrize(
    ("name", "method"), [(n, m) for n, methods in FITS.items() for m in methods]
)
def test_rows_load_for_their_methods(name, method):
    path = EXAMPLES / f"{name}.jsonl"
    columns = COLUMNS.get((name, method), {})
    rows = load(data_config("jsonl", path=str(path), columns=columns), method).rows
    assert len(rows) == len({str(row) for row in rows}) == len(path.read_text().splitlines())


def test_every_file_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.jsonl")} == set(FITS)


def test_rewards_judge_the_worked_answers():
    rows = [json.loads(line) for line in (EXAMPLES / "math.jsonl").open()]
    completions, answers = [row["completion"] for row in rows], [row["answer"] for row in rows]
    assert rewards.last_number(completions, answers) == [1.0] * len(rows)
    assert rewards.last_number(completions, answers[1:] + answers[:1]) == [0.0] * len(rows)
    assert rewards.brevity(completions) == [1.0] * len(rows)
    assert rewards.brevity(["x" * 400, ""]) == [0.5, 1.0]


def test_the_last_number_is_compared_as_a_number():
    answers = ["1,234", "87", "#### 5", "-2.5", "none", "3"]
    completions = ["so 1234.", "87.00", "It is 5", "1 or -2.50", "7", "no idea"]
    assert rewards.last_number(completions, answers) == [1.0, 1.0, 1.0, 1.0, None, 0.0]


def test_the_dstack_task_uses_all_of_its_gpus():
    """Dstack 0.22.5 parses the file (parse_run_configuration)."""
    task = yaml.safe_load((EXAMPLES / "mi300x.dstack.yml").read_text())
    (command,) = task["commands"]
    config, _ = prepare(composed(*Request(shlex.split(command)[2:])))
    assert task["resources"]["gpu"] == f"MI300X:{placement.num_gpus(config)}"
    assert config.runtime.name == "local"
    assert Path(config.run_root).is_relative_to(task["volumes"][0].partition(":")[2])
