"""Test the form of messages, and messages that a chat template cannot render."""

import pickle

import pytest

from launch.core.row_check import conformed, row_problem
from launch.core.row_formats import FORMATS
from launch.core.row_messages import without_nulls
from recipes.data import data_messages
from recipes.data.data_load import load
from recipes.data.data_messages import RowError, render
from recipes.models.model_build import train_tokenizer
from tests.helpers.data_rows import data_config, jsonl


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "be brief"}
PARTS = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]
CALL = {"id": None, "function": {"name": "f", "arguments": '{"a": null}'}}
IMAGE = [{"type": "image", "image": "x"}, {"type": "text", "text": "?"}]
SIDES = {"chosen": [assistant("2")], "rejected": [assistant("3")]}


def sides(*before):
    return {name: [*before, *side] for name, side in SIDES.items()}


@pytest.mark.parametrize(("method", "row", "expected"), [
    ("sft", {"text": "a"}, {"text": "a"}),
    ("sft", {"messages": [user(PARTS), assistant("2", name=None)]},
     {"messages": [user("1+1"), assistant("2")]}),
    ("sft", {"messages": [user("a"), assistant(None, tool_calls=[CALL])]},
     {"messages": [user("a"), {"role": "assistant", "tool_calls": [
         {"function": {"name": "f", "arguments": {"a": None}}}]}]}),
    ("sft", {"prompt": "1+1", "completion": [assistant("2")]},
     {"prompt": [user("1+1")], "completion": [assistant("2")]}),
    ("sft", {"prompt": [user("1+1")], "completion": "2"},
     {"prompt": [user("1+1")], "completion": [assistant("2")]}),
    ("samples", {"prompt": "1+1", "completion": [assistant("2")], "score": 1},
     {"prompt": [user("1+1")], "completion": [assistant("2")], "score": 1}),
    ("dpo", {"prompt": [user("1+1")], **sides(user("1+1"))}, {"prompt": [user("1+1")], **SIDES}),
    ("dpo", {"prompt": "1+1", **sides(SYSTEM, user("1+1"))},
     {"prompt": [SYSTEM, user("1+1")], **SIDES}),
    ("dpo", {"prompt": [SYSTEM, user("1+1")], **sides(user("1+1"))},
     {"prompt": [SYSTEM, user("1+1")], **SIDES}),
    ("dpo", {"prompt": "1+1\n", **sides(SYSTEM, user(" 1+1"))},
     {"prompt": [SYSTEM, user("1+1\n")], **SIDES}),
    ("dpo", sides(user("1+1")), sides(user("1+1"))),
    ("sft", {"messages": [user("a"), assistant("2", train=False), assistant("3", train=True)]},
     {"messages": [user("a"), assistant("2", weight=0), assistant("3")]}),
    ("sft", {"messages": [user("a"), assistant("2", loss=False), assistant("3", loss=True)]},
     {"messages": [user("a"), assistant("2", weight=0), assistant("3")]}),
    ("sft", {"prompt": "1 + 1", "completion": "1 + 1"}, {"prompt": "1 + 1", "completion": "1 + 1"}),
    ("sft", {"prompt": "1 + 1", "completion": "1 + 1 = 2", "finished": True},
     {"prompt": "1 + 1", "completion": "1 + 1 = 2", "finished": True}),
    ("sft", {"text": "a", "system": " "}, {"text": "a", "system": " "}),
    ("grpo", {"prompt": "1+1", "completion": [assistant("2")]},
     {"prompt": "1+1", "completion": [assistant("2")]}),
])  # fmt: skip
def test_messages_have_one_form(method, row, expected):
    assert conformed(row, method) == expected
    assert row_problem(conformed(row, method), method) is None


@pytest.mark.parametrize(("method", "row", "problem"), [
    ("sft", {"messages": [user(IMAGE), assistant("2")]}, 'messages is {"role": "user"'),
    ("sft", {"messages": [user("a"), assistant("2", weight=0.5)]}, "messages is {"),
    ("sft", {"messages": [user("a"), assistant("2", train="no")]}, "messages is {"),
    ("sft", {"messages": [user("a"), assistant(None, weight=1)]}, "messages is {"),
    ("sft", {"prompt": [user("a")], "completion": [user("b"), assistant("2")]},
     "completion begins with a message of user"),
    ("dpo", {"prompt": [user("a")], **sides(SYSTEM)}, "chosen begins with a message of system"),
    ("dpo", {"prompt": [SYSTEM, user("a")], **sides(user("b"))}, "chosen begins with"),
    ("dpo", {"chosen": "2", "rejected": [assistant("3")]}, "chosen and rejected must both"),
    ("evaluate", {"prompt": "a", "answer": float("nan")}, "answer is NaN"),
    ("grpo", {"prompt": "a", "answer": float("inf")}, "answer is Infinity"),
    *(("grpo", {"prompt": "a", name: [1]}, f"has the field {name},")
      for name in FORMATS["grpo"].reserved),
])  # fmt: skip
def test_rows_that_mean_something_else_are_rejected(method, row, problem):
    assert row_problem(conformed(row, method), method).startswith(problem)


def test_tables_do_not_add_null_keys(tmp_path):
    prompts = [[user("1")], [user("2") | {"name": "me"}], [assistant("3", tool_calls=[CALL])]]
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in prompts])
    rows = load(data_config("jsonl", path=path), "grpo").rows
    assert list(rows["prompt"]) == [conformed({"prompt": p}, "grpo")["prompt"] for p in prompts]
    assert without_nulls({"a": [{"b": None, "c": [None, 1]}]}) == {"a": [{"c": [None, 1]}]}


@pytest.mark.parametrize(("template", "words"), [
    ("{{ raise_exception('No second user.') if messages|length > 1 }}", ": No second user. Use:"),
    ("{{ messages[1]['content'] + 1 if messages|length > 1 }}", "TypeError"),
    ("{{ messages[messages|length - 1]['name'] + '' if messages|length > 1 }}", "no attribute"),
    ("{% for _ in range(10 ** 8 if messages|length > 1 else 1) %}{% endfor %}", "Range too big"),
    ("{% for _ in range(10 ** 3) %}{% for _ in range(10 ** 5 if messages|length > 1 else 0) %}"
     "{% endfor %}{% endfor %}", "takes more than 0.2 s"),
    ("{{ 'a' * 10 ** (10 if messages|length > 1 else 1) }}", "more than 33,554,432 characters"),
    ("{{ ('a' * 10 ** 5 * 2) * (messages|length) * 10 ** 2 }}", "more than 33,554,432 characters"),
    ("{{ 10 ** (10 ** (10 if messages|length > 1 else 1)) }}", "more than 33,554,432 characters"),
    (None, "chat_template is not set"),
])  # fmt: skip
def test_the_error_has_the_messages_and_the_templates_words(monkeypatch, template, words):
    monkeypatch.setattr(data_messages, "LONGEST_S", 0.2)
    tokenizer = train_tokenizer(["1 plus 2"], 300)
    tokenizer.chat_template = template
    bad = [user("1"), user("2")]
    conversations = [[user("0")], bad] if template else [bad]
    with pytest.raises(RowError, match=words) as raised:
        render(tokenizer, conversations, [{}] * len(conversations), tokenize=False)
    assert raised.value.messages == bad
    copy = pickle.loads(pickle.dumps(raised.value))  # from a worker process
    assert (str(copy), copy.messages) == (str(raised.value), bad)
