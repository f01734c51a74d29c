"""Test loading: disjoint generated problems, local files and their errors, preference pairs."""

import itertools
import json
import random
import re

import pytest
from datasets import Dataset

from launch.core import row_check, row_formats
from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.core.json_lines import MAX_ROW
from launch.core.row_check import row_problem
from recipes.data import data_load, tasks
from recipes.data.data_load import load, load_heldout, load_heldout_table
from tests.conftest import composed
from tests.helpers import data_rows
from tests.helpers.data_rows import data_config


def configured(name="reasoning", **own):
    return data_config(name, **own)


def task(name="chain_sum", level=0, weight=1.0, worked=0.0, **config):
    return {"name": name, "level": level, "weight": weight, "worked": worked, "config": config}


def test_rows_of_the_mi350x_experiments_fill_every_step():
    config = composed("experiment=mi350x_qwen3_8b_full")
    args = config.method.args
    rows = args["max_steps"] * args["per_device_train_batch_size"] * config.topology.num_gpus
    data = data_config("reasoning", num_train=40, num_heldout=5, tasks=plain(config.data.tasks))
    # A tokenizer makes at least one token of a word and of a run of separators.
    words = [
        len(re.findall(r"\w+|[^\w\s]+", p["prompt"][0]["content"] + p["answer"]))
        for p in tasks.generate(data)[0]
    ]
    assert config.data.num_train * min(words) >= rows * args["max_length"]


def questions(problems):
    return {problem["prompt"][0]["content"] for problem in problems}


def test_training_and_heldout_problems_are_disjoint():
    train, heldout = tasks.generate(configured())
    assert (len(train), len(heldout), len(questions(heldout))) == (8000, 500, 500)
    assert not questions(train) & questions(heldout)


def test_two_tasks_with_the_same_questions_are_disjoint():
    same = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    both = [task(**same), task(**same, allow_negation=False)]
    train, heldout = tasks.generate(configured(tasks=both, num_train=300, num_heldout=60))
    assert not questions(train) & questions(heldout)


def test_problems_depend_only_on_the_data_seed():
    first, second, other = (
        tasks.generate(configured(seed=seed, num_train=50, num_heldout=20)) for seed in (5, 5, 6)
    )
    assert first == second
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_weights_and_levels_of_tasks():
    both = [task(weight=3.0, level=2), task("gcd", weight=1.0)]
    train, heldout = tasks.generate(configured(tasks=both, num_train=400, num_heldout=40))
    assert [sum(p["task"] == "gcd" for p in part) for part in (train, heldout)] == [100, 10]
    entry = json.loads(next(p["entry"] for p in train if p["task"] == "chain_sum"))
    assert entry["metadata"]["difficulty"] == {"num_terms": [2, 4], "num_digits": [1, 3]}


def test_worked_rows_of_cups_follow_the_ball():
    train, heldout = tasks.generate(configured("cups", num_train=1000, num_heldout=20))
    worked = 0
    for problem in train:
        metadata = json.loads(problem["entry"])["metadata"]
        # Move the cups instead of the ball.
        order, places = ["1", "2", "3", "4", "5"], []
        ball = order[metadata["start"] - 1]
        for first, second in metadata["swaps"]:
            order[first - 1], order[second - 1] = order[second - 1], order[first - 1]
            places.append(str(order.index(ball) + 1))
        answer, text = problem["answer"], problem["completion"][0]["content"]
        assert answer == places[-1]
        with_solution = f"<think>{' '.join(places)}</think>{answer}"
        assert text in (f"<think></think>{answer}", with_solution)
        worked += text == with_solution
        assert tasks.score(answer, problem["entry"]) == 1.0
        assert tasks.score(str(int(answer) % 5 + 1), problem["entry"]) == 0.0
    assert worked == pytest.approx(400, abs=62)  # four standard deviations
    swaps = {len(json.loads(problem["entry"])["metadata"]["swaps"]) for problem in heldout}
    assert swaps == {2, 4, 8}
    assert all(problem["completion"][0]["content"] == problem["answer"] for problem in heldout)


def test_heldout_completions_for_losses_have_the_training_format():
    settings = configured("cups", num_train=300, num_heldout=300)
    heldout = load_heldout_table(settings, "sft")
    for rows in (heldout, load(settings, "sft").rows):
        texts = [row["completion"][0]["content"] for row in rows]
        assert all(text.startswith("<think>") for text in texts)
        worked = sum(not text.startswith("<think></think>") for text in texts)
        assert worked == pytest.approx(120, abs=34)  # four standard deviations
    assert list(heldout["prompt"]) == [row["prompt"] for row in load_heldout(settings)]


def test_chosen_and_rejected_differ_only_in_the_answer():
    settings = configured("cups", num_train=200, num_heldout=30)
    for pairs in (
        load(settings, "dpo").rows,
        load_heldout_table(settings, "dpo"),
    ):
        for pair in pairs:
            chosen, rejected = (
                pair[side][0]["content"].partition("</think>") for side in ("chosen", "rejected")
            )
            assert chosen[:2] == rejected[:2]
            assert chosen[2] != rejected[2]


@pytest.mark.parametrize(("own", "message"), [
    ({"tasks": [task(min_term=2)]}, "chain_sum.*min_term"),
    ({"tasks": [task(min_terms=0)]}, "chain_sum.*min_terms must be positive"),
    ({"tasks": [task("rubiks_cube")]}, "rubiks_cube cannot be scored"),
    ({"tasks": [task()], "num_heldout": 500}, "too few distinct questions"),
    ({"tasks": [task("shuffled_cups", cups="five")]}, "shuffled_cups.*cups"),
    ({"tasks": [task("shuffled_cups", min_swaps=2.5)]}, "shuffled_cups.*min_swaps"),
    ({"tasks": [task("spell_backward", data_file=3)]}, "spell_backward.*data_file"),
])  # fmt: skip
def test_tasks_reject_wrong_configurations(own, message):
    with pytest.raises(UserError, match=message):
        tasks.generate(configured(**own))


def test_pairs_need_two_different_answers():
    entry = tasks.generate(configured(num_train=1))[0][0]["entry"]
    problem = {"task": "t", "answer": json.loads(entry)["answer"], "entry": entry}
    with pytest.raises(UserError, match="same answer"):
        tasks.wrong_answer(problem, [problem], random.Random(0))


@pytest.mark.parametrize(("method", "columns"), [
    ("sft", ["prompt", "completion"]),
    ("dpo", ["prompt", "chosen", "rejected"]),
    ("grpo", ["prompt", "answer", "task", "level", "entry"]),
])  # fmt: skip
def test_columns_of_each_method(method, columns):
    rows = load(configured(num_train=20, limit=6), method).rows
    assert (rows.column_names, len(rows)) == (columns, 6)


def test_pairs_have_a_wrong_answer_and_need_few_scores(monkeypatch):
    """Scoring all answers for all problems would take hours for data=cups."""
    settings, scores, score = configured(num_train=300), [], tasks.score
    problems = tasks.generate(settings)[0]
    monkeypatch.setattr(tasks, "score", lambda *args: scores.append(1) or score(*args))
    pairs = load(settings, "dpo").rows
    assert len(scores) < 3 * 300
    assert pairs.to_list() == load(settings, "dpo").rows.to_list()
    for pair, problem in zip(pairs, problems, strict=True):
        assert score(pair["chosen"][0]["content"], problem["entry"]) == 1.0
        assert score(pair["rejected"][0]["content"], problem["entry"]) < 1.0


def jsonl(tmp_path, *rows):
    return data_rows.jsonl(tmp_path / "rows.jsonl", rows)


@pytest.mark.parametrize(("line", "message"), [
    ('{"prompt": "a"', "not a JSON object"),
    ("[1]", "not a JSON object .*list"),
    ('{"prompt": "a"}', r"sft needs messages or text or prompt\+completion"),
    ("{}", "sft needs"),
    ('{"prompt": ' + "9" * 5000 + "}", "4300 digits"),
    (r'{"text": "\ud83d\ude00", "x": ["\uD83D"]}', r"\\ud83d"),
    ('{"prompt": "a", "completion": "b", "prompt": "c"}', '"prompt"'),
])  # fmt: skip
def test_errors_name_the_line(tmp_path, line, message):
    path = jsonl(tmp_path, {"prompt": "a", "completion": "b"}, "", line)
    with pytest.raises(UserError, match=f"rows.jsonl:3: .*{message}"):
        list(data_load.lines(path, configured("jsonl"), "sft"))


MESSAGE, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_next_to_messages_is_omitted(tmp_path, streaming):
    row = {"messages": [MESSAGE, ANSWER]}
    path = jsonl(tmp_path, row, {"prompt": "a", **row})
    rows = load(configured("jsonl", path=path, streaming=streaming), "sft").rows
    assert list(itertools.islice(rows, 2)) == [row, row]


TURNS = {"messages": [MESSAGE, ANSWER]}


@pytest.mark.parametrize(("method", "row", "field"), [
    ("sft", {"prompt": "a", "completion": 3}, "completion is 3"),
    ("sft", {"prompt": None, "completion": "b"}, "prompt is null"),
    ("sft", {"messages": []}, r"messages is \[\]"),
    ("sft", {"messages": [MESSAGE, {"from": "human"}]}, "messages is {.*from"),
    ("sft", {"text": [MESSAGE]}, "text is"),
    ("sft", {"text": "a", **TURNS}, "messages, and text"),
    ("sft", {**TURNS, "tools": "[{]"}, "tools is"),
    ("sft", {**TURNS, "chat_template_kwargs": "a"}, "chat_template_kwargs is"),
    ("dpo", {"prompt": "a", "chosen": "b", "rejected": None}, "rejected is null"),
    ("evaluate", {"prompt": "a", "answer": ["1"]}, "answer is"),
    ("evaluate", {"prompt": "a", "answer": True}, "answer is true"),
    ("grpo", {"prompt": "a", "answer": True}, "answer is true"),
    ("sft", {"messages": [MESSAGE, {"role": "GPT", "content": "b"}]}, "GPT.*assistant"),
    ("grpo", {"prompt": [{"role": "narrator", "content": "a"}]}, "narrator"),
    ("sft", {"messages": [MESSAGE, ANSWER, MESSAGE]}, "messages ends with"),
    ("dpo", {"prompt": [MESSAGE], "chosen": [ANSWER], "rejected": [MESSAGE]}, "rejected ends"),
    ("sft", {"text": "a" * (MAX_ROW + 1)}, "a row of more than 32 MiB"),
    ("dpo", {"question": "a", "chosen": "b", "rejected": "c"}, "Use: data.columns.prompt=question"),
    ("dpo", {"prompt": "a b", "chosen": "a b c", "rejected": "a b d"}, "prompt is repeated"),
    ("sft", {"prompt": "a b\n", "completion": "a b c"}, "prompt is repeated in completion"),
    ("dpo", {"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"}, "the field system"),
    ("sft", {"system": "s", "prompt": "a", "completion": "b"}, "the field system"),
    ("sft", {"system": "s", **TURNS}, "the field system"),
])  # fmt: skip
def test_invalid_rows_are_rejected(monkeypatch, method, row, field):
    table = Dataset.from_list([row])
    monkeypatch.setattr(data_load.datasets, "load_dataset", lambda *args, **kwargs: table)
    with pytest.raises(UserError, match=f"me/rows, split train, row 0: .*{field}"):
        list(data_load._hub(configured("hub", hub_id="me/rows", revision="0"), "train", method, {}))


def test_an_added_method_has_its_own_format(monkeypatch):
    fields = ("prompt", "rating")
    monkeypatch.setitem(row_formats.FORMATS, "rated", row_formats.RowFormat((fields,), fields))
    monkeypatch.setitem(
        row_check.VALUES, "rating", (lambda value: type(value) is bool, "true or false")
    )
    assert row_problem({"prompt": "a", "rating": True}, "rated") is None
    assert row_problem({"prompt": "a", "rating": 1}, "rated").startswith("rating is 1")
    with pytest.raises(UserError, match="data=reasoning: .* needs .*rating"):
        load(configured(num_train=4), "rated")
    with pytest.raises(UserError, match="method.rows=ratd: no such row format. Did you mean rated"):
        load(configured(num_train=4), "ratd")


def test_null_fields_of_another_format_are_omitted():
    called = [MESSAGE, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert row_problem({"prompt": None, "messages": called}, "sft") is None
    row = {"prompt": "a", "completion": "", "messages": None, "text": None}
    assert row_problem(row, "sft") is None
    assert data_load.trainer_fields(row, "sft") == ["prompt", "completion"]


@pytest.mark.parametrize(("method", "streaming"), [("sft", False), ("sft", True), ("dpo", False)])
def test_each_row_keeps_its_tools_and_template_arguments(tmp_path, method, streaming):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": "int"}}}]
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}
        for arguments in ({"a": 1}, {"b": 2, "c": None}, {"a": "text"})
    ]
    field = "messages" if method == "sft" else "chosen"
    rows = []
    for n, call in enumerate(calls):
        sides = {"prompt": [MESSAGE], "chosen": [call], "rejected": [ANSWER]}
        row = {"messages": [MESSAGE, call]} if method == "sft" else sides
        rows.append(row | {"chat_template_kwargs": {"n": n}} | ({"tools": tools} if n else {}))
    settings = configured("jsonl", path=jsonl(tmp_path, *rows), streaming=streaming)
    stream = itertools.islice(load(settings, method).rows, 100)  # a stream has no end
    loaded = {row["chat_template_kwargs"]["n"]: row for row in stream}
    for n, row in enumerate(rows):
        assert loaded[n][field][-1]["tool_calls"] == row[field][-1]["tool_calls"]
        assert (json.loads(loaded[n]["tools"]) if loaded[n].get("tools") else None) == row.get(
            "tools"
        )


def test_template_arguments_must_be_in_all_rows_or_none(tmp_path):
    path = jsonl(tmp_path, {**TURNS, "chat_template_kwargs": {"thinks": True}}, TURNS)
    with pytest.raises(UserError, match="others messages .messages. and chat_template_kwargs"):
        load(configured("jsonl", path=path), "sft")


@pytest.mark.parametrize("rows", [
    [{"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "c", "answer": 2.5},
     {"prompt": "d", "note": ["x"]}],
    [{"prompt": [MESSAGE]}, {"prompt": [MESSAGE | {"name": "me"}], "note": {"a": 1}},
     {"prompt": [MESSAGE], "note": {"b": "c"}}],
    [{"prompt": [MESSAGE]}, {"prompt": [MESSAGE, CALL, MESSAGE]}],
])  # fmt: skip
def test_chunks_of_rows_equal_a_complete_table(tmp_path, monkeypatch, rows):
    settings = configured("jsonl", path=jsonl(tmp_path, *rows))
    whole = load(settings, "grpo")
    monkeypatch.setattr(data_load, "CHUNK", 1)
    pieces = load(settings, "grpo")
    assert pieces.rows.to_list() == whole.rows.to_list()
    assert pieces.rows.features == whole.rows.features
    assert pieces.counts == whole.counts
    assert pieces.sha256() == whole.sha256()


@pytest.mark.parametrize("piece", [1, 100])
@pytest.mark.parametrize(("values", "words"), [
    ([1, "1"], "common type"), ([1, 10**30], r"rows\.jsonl:2: answer contains the integer 1000"),
])  # fmt: skip
def test_values_without_a_common_type_are_rejected(tmp_path, monkeypatch, piece, values, words):
    monkeypatch.setattr(data_load, "CHUNK", piece)
    path = jsonl(tmp_path, *({"prompt": "a", "answer": value} for value in values))
    with pytest.raises(UserError, match=words):
        load(configured("jsonl", path=path), "grpo")


def test_tokenizer_texts(monkeypatch):
    rows = [{"prompt": [MESSAGE], "completion": "b", "answer": "no"}, {"messages": [ANSWER]}]
    assert data_load.texts(rows) == ["a", "b", "b"]
    monkeypatch.setattr(data_load, "LARGE_TABLE", 10)
    monkeypatch.setattr(data_load, "TOKENIZER_ROWS", 3)
    table = Dataset.from_dict({"text": [str(n) for n in range(12)]})
    assert data_load.texts(table) == ["0", "4", "8"]  # from all of a large table
    assert data_load.texts(table.select(range(10))) == [str(n) for n in range(10)]


def test_empty_data_is_rejected(tmp_path):
    with pytest.raises(UserError, match="no rows"):
        load(configured("jsonl", path=jsonl(tmp_path, "")), "sft")
    with pytest.raises(UserError, match="no rows"):
        load_heldout(configured(num_train=5, num_heldout=0))


def test_an_unreachable_hub_is_a_user_error(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="nobody/nothing"):
        load(configured("hub", hub_id="nobody/nothing", revision="0" * 40), "sft")
