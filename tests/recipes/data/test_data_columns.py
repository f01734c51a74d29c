"""Test mapped fields, extracted answers and system prompts of the rows that a run trains on."""

import pytest
from datasets import Dataset

from launch.core.errors import UserError
from recipes.data import data_load
from recipes.data.data_load import load, load_heldout
from tests.helpers.data_rows import data_config, jsonl
from tests.helpers.hub_data import PAIR, PROBLEM, RIGHT, WRONG, write_public

ROWS = [
    {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5", "id": 1},
    {"question": "What is 999 + 1?", "answer": "#### no\n#### 1,000", "id": 2},
]
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
COLUMNS = {"prompt": "question", "answer": "answer"}


def system(text):
    return [{"role": "system", "content": text}] if text else []


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_answers_are_extracted_from_files_and_the_hub(tmp_path, monkeypatch):
    keys = {"columns": COLUMNS, "answer_pattern": r"####\s*(.+)"}
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    file = data_config("jsonl", path=path, heldout_path=path, **keys)
    table = Dataset.from_list(ROWS)
    asked = []
    monkeypatch.setattr(
        data_load.datasets, "load_dataset", lambda *args, **kwargs: asked.append(args) or table
    )
    hub = data_config("hub", hub_id="me/math", subset="main", revision="0", **keys)
    expected = [("What is 2 + 3?", "5"), ("What is 999 + 1?", "1,000")]
    for rows in (load(file, "grpo").rows, load_heldout(file), load(hub, "grpo").rows):
        assert [(row["prompt"], row["answer"]) for row in rows] == expected
        assert "question" not in rows[0]
    assert asked == [("me/math", "main")]


def test_sources_of_a_mix_have_their_own_columns(tmp_path):
    other = [{"instruction": "a", "output": "b"}]
    sources = [
        {"path": jsonl(tmp_path / "a.jsonl", ROWS), "weight": 0.5},
        {"path": jsonl(tmp_path / "b.jsonl", other), "weight": 0.5}
        | {"columns": {"prompt": "instruction", "completion": "output"}},
    ]
    columns = {"prompt": "question", "completion": "answer"}
    rows = load(data_config("mix", sources=sources, columns=columns), "sft").rows
    assert {row["prompt"] for row in rows} >= {"a", "What is 2 + 3?"}


@pytest.mark.parametrize("text", ["Think.", ""])
@pytest.mark.parametrize(("method", "row", "expected"), [
    ("grpo", {"prompt": "a", "answer": "1"}, {"prompt": [user("a")]}),
    ("sft", {"prompt": "a", "completion": "b"},
     {"prompt": [user("a")], "completion": [assistant("b")]}),
    ("sft", {"messages": [user("a"), assistant("b")]}, {"messages": [user("a"), assistant("b")]}),
    ("dpo", {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
     {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}),
    ("dpo", {"prompt": "a", "chosen": [user("a"), assistant("b")],
             "rejected": [user("a"), assistant("c")]},
     {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}),
])  # fmt: skip
def test_conversations_begin_with_the_system_prompt(tmp_path, method, row, expected, text):
    path = jsonl(tmp_path / "a.jsonl", [row])
    loaded = load(data_config("jsonl", path=path, system_prompt=text), method).rows[0]
    first = {"prompt", "messages"} & expected.keys() or {"chosen", "rejected"}
    expected = {name: system(text) * (name in first) + value for name, value in expected.items()}
    assert {name: loaded[name] for name in expected} == expected


def test_a_system_prompt_of_a_row_stays(tmp_path):
    row = {"prompt": [*system("Own."), user("a")], "answer": "1"}
    path = jsonl(tmp_path / "a.jsonl", [row])
    assert load(data_config("jsonl", path=path, system_prompt="T"), "grpo").rows[0] == row


@pytest.mark.parametrize(("columns", "row", "problem"), [
    ({"prompt": "q"}, {"question": "a"}, r":1: data.columns.prompt=q, but the row has question"),
    ({"prompt": "question"}, {"problem": "a", "solution": "b"},
     r"has problem, solution\. Use: data\.columns\.prompt=problem\."),
    ({"prompt": "a.b"}, {"a": {"c": 1}}, r":1: data.columns.prompt=a.b"),
])  # fmt: skip
def test_columns_that_rows_lack_are_rejected(tmp_path, columns, row, problem):
    path = jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match=problem):
        load(data_config("jsonl", path=path, columns=columns), "grpo")


@pytest.mark.parametrize(("name", "method", "expected"), [
    ("gsm8k", "grpo", {"prompt": [*system(BOXED), user("What is 2 + 3?")], "answer": "5"}),
    ("gsm8k", "sft", {"prompt": [*system(BOXED), user("What is 2 + 3?")],
                      "completion": [assistant(PROBLEM["answer"])]}),
    ("ultrachat", "sft", {"messages": RIGHT}),
    ("ultrafeedback", "dpo", {"prompt": RIGHT[:1], "chosen": RIGHT[1:], "rejected": WRONG[1:]}),
])  # fmt: skip
def test_public_data_of_the_published_columns(
    tmp_path, capsys, monkeypatch, name, method, expected
):
    monkeypatch.setattr(data_load.datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    equal = {**PAIR, "rejected": RIGHT}  # a pair of the public data without a preference
    (tmp_path / "hub").mkdir()
    folder = write_public(tmp_path / "hub", name, *([equal] if method == "dpo" else []))
    data = data_config(name, hub_id=folder)
    loaded = load(data, method)
    assert loaded.rows.to_list() == [expected] * 8
    assert sum(loaded.counts.get("unusable", {}).values()) == (method == "dpo")
    assert ("row 8: chosen and rejected are equal" in capsys.readouterr().out) == (method == "dpo")
    assert len(load_heldout(data, method)) == 8
