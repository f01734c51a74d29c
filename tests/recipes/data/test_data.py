"""Test rows: disjoint generated problems, local files and their errors, preference pairs."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym
from datasets import Dataset
from omegaconf import OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.schema import Data
from recipes.data import Later, data, tasks
from recipes.rewards import rewards

CONF = Path(__file__).parents[3] / "conf/data"


def configured(name="reasoning", **own):
    merged = OmegaConf.merge(OmegaConf.structured(Data), OmegaConf.load(CONF / f"{name}.yaml"), own)
    # as config.yaml of a run has it
    settings = OmegaConf.create(plain(OmegaConf.to_object(merged)))
    OmegaConf.set_struct(settings, True)  # as a rank reads it
    return settings


def task(name="chain_sum", level=0, weight=1.0, worked=0.0, **config):
    return {"name": name, "level": level, "weight": weight, "worked": worked, "config": config}


def questions(problems):
    return {problem["prompt"][0]["content"] for problem in problems}


def test_rows_of_ones_own_need_no_reasoning_gym():
    """Train on files without it; importing it takes two seconds of each rank."""
    without = (
        "import sys; sys.modules['reasoning_gym'] = None; "
        "import recipes.sft, recipes.dpo, recipes.grpo; print('imported')"
    )
    done = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, check=False
    )
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_training_and_heldout_problems_of_the_quickstart_do_not_meet(seed):
    train, heldout = tasks.generate(configured(seed=seed))
    assert (len(train), len(heldout)) == (8000, 500)
    assert not questions(train) & questions(heldout)
    assert len(questions(heldout)) == 500


def test_two_tasks_that_ask_the_same_do_not_meet_either():
    same = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, heldout = tasks.generate(
        configured(
            tasks=[task(**same), task(**same, allow_negation=False)], num_train=300, num_heldout=60
        )
    )
    assert not questions(train) & questions(heldout)


def test_problems_follow_from_the_data_seed_alone():
    first, second, other = (
        tasks.generate(configured(seed=seed, num_train=50, num_heldout=20)) for seed in (5, 5, 6)
    )
    assert first == second
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_weights_share_out_the_problems():
    both = [task(weight=3.0, max_digits=3), task("gcd", weight=1.0)]
    train, heldout = tasks.generate(configured(tasks=both, num_train=400, num_heldout=40))
    assert [sum(p["task"] == "gcd" for p in part) for part in (train, heldout)] == [100, 10]


def test_a_share_of_the_training_rows_shows_where_the_ball_was():
    own = {"num_train": 2000, "num_heldout": 20}
    train, heldout = tasks.generate(configured("cups", **own))
    worked = [
        problem
        for problem in train
        if not problem["completion"][0]["content"].startswith("<think></think>")
    ]
    assert len(worked) == pytest.approx(800, abs=88)  # four standard deviations
    for problem in train:
        metadata = json.loads(problem["entry"])["metadata"]
        # the ball's place is that of the cup that stood over it
        order, found = (["1", "2", "3", "4", "5"], [])
        ball = order[metadata["start"] - 1]
        for first, second in metadata["swaps"]:
            order[first - 1], order[second - 1] = order[second - 1], order[first - 1]
            found.append(str(order.index(ball) + 1))
        assert problem["answer"] == found[-1]
        assert problem["completion"][0]["content"] in (
            f"<think></think>{found[-1]}",
            f"<think>{' '.join(found)}</think>{found[-1]}",
        )
        assert (
            tasks.score(rewards.final_answer(problem["completion"][0]["content"]), problem["entry"])
            == 1.0
        )
        assert (
            tasks.score(str(int(found[-1]) % 5 + 1), problem["entry"])
            == tasks.score(" ".join(found), problem["entry"])
            == 0.0
        )
    assert {len(json.loads(problem["entry"])["metadata"]["swaps"]) for problem in heldout} == {
        2,
        4,
        8,
    }
    assert all(problem["completion"][0]["content"] == problem["answer"] for problem in heldout)
    assert train == tasks.generate(configured("cups", **own))[0]
    answers = configured("cups", **own)
    for one in answers.tasks:
        one.worked = 0.0
    assert [(p["prompt"], p["answer"]) for p in train] == [
        (p["prompt"], p["completion"][0]["content"]) for p in tasks.generate(answers)[0]
    ]


def test_heldout_rows_whose_loss_is_taken_are_like_those_trained_on():
    settings = configured("cups", num_train=300, num_heldout=300)
    shown = [row["completion"][0]["content"] for row in data.load_heldout_table(settings, "sft")]
    trained = [row["completion"][0]["content"] for row in data.load_train(settings, "sft")]
    for texts in (shown, trained):
        assert all(text.startswith("<think>") for text in texts)
        # four standard deviations
        assert sum(not text.startswith("<think></think>") for text in texts) == pytest.approx(
            120, abs=34
        )
    assert [row["prompt"] for row in data.load_heldout_table(settings, "sft")] == [
        row["prompt"] for row in data.load_heldout(settings)
    ]


def test_the_sides_of_a_pair_differ_by_the_answer_and_not_by_their_form():
    settings = configured("cups", num_train=200, num_heldout=30)
    for pairs in (data.load_train(settings, "dpo"), data.load_heldout_table(settings, "dpo")):
        for pair in pairs:
            chosen, rejected = (
                pair[side][0]["content"].partition("</think>") for side in ("chosen", "rejected")
            )
            assert chosen[:2] == rejected[:2]
            assert chosen[1] == "</think>"
            assert chosen[2] != rejected[2]


def test_level_raises_every_attribute():
    entry = json.loads(
        tasks.generate(configured(tasks=[task(level=2)], num_train=1, num_heldout=0))[0][0]["entry"]
    )
    assert entry["metadata"]["difficulty"] == {"num_terms": [2, 4], "num_digits": [1, 3]}


def test_score_is_the_tasks_own():
    problem = tasks.generate(configured(num_train=1, num_heldout=0))[0][0]
    assert tasks.score(problem["answer"], problem["entry"]) == 1.0
    assert tasks.score("nonsense", problem["entry"]) == 0.0


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"tasks": [task(min_term=2)]}, "refuses its configuration.*min_term"),
        ({"tasks": [task(min_terms=0)]}, "refuses its configuration.*min_terms must be positive"),
        ({"tasks": [task("rubiks_cube")]}, "does not accept the task's own answer"),
        ({"tasks": [task()], "num_heldout": 500}, "too few different questions"),
        (
            {"tasks": [task("shuffled_cups", cups=10)]},
            "refuses its configuration.*cups must be from 2 to 9",
        ),
        (
            {"tasks": [task("shuffled_cups", min_swaps=5, max_swaps=4)]},
            "min_swaps must be 1 or more, and max_swaps no less",
        ),
        (
            {"tasks": [task("shuffled_cups", cups="five")]},
            "shuffled_cups has cups='five'; it takes a whole number, for example cups: 5",
        ),
        (
            {"tasks": [task("shuffled_cups", cups=None)]},
            "shuffled_cups has cups=None; it takes a whole number",
        ),
        (
            {"tasks": [task("shuffled_cups", min_swaps=2.5)]},
            "shuffled_cups has min_swaps=2.5; it takes a whole number",
        ),
        (
            {"tasks": [task(min_terms=True)]},
            "chain_sum has min_terms=True; it takes a whole number",
        ),
        (
            {"tasks": [task(allow_negation=1)]},
            "chain_sum has allow_negation=1; it takes true or false, for example allow_negation: "
            "false",
        ),
        (
            {"tasks": [task("spell_backward", data_file=3)]},
            "spell_backward refuses its configuration",
        ),
    ],
)
def test_what_generation_refuses(own, message):
    with pytest.raises(UserError, match=message):
        tasks.generate(configured(**own))


def test_a_task_whose_answers_are_all_equal_gives_no_pairs():
    problem = {
        "task": "t",
        "answer": "1",
        "entry": tasks.generate(configured(num_train=1))[0][0]["entry"],
    }
    right = json.loads(problem["entry"])["answer"]
    with pytest.raises(UserError, match="same answer"):
        tasks.wrong_answer(
            {**problem, "answer": right}, [{**problem, "answer": right}], random.Random(0)
        )


@pytest.mark.parametrize(
    ("method", "columns"),
    [
        ("sft", ["prompt", "completion"]),
        ("dpo", ["prompt", "chosen", "rejected"]),
        ("grpo", ["prompt", "answer", "task", "level", "entry"]),
    ],
)
def test_each_trainer_gets_its_columns(method, columns):
    rows = data.load_train(configured(num_train=20, limit=6), method)
    assert (rows.column_names, len(rows)) == (columns, 6)


def test_making_pairs_scores_few_answers(monkeypatch):
    """Score few; all with all would take hours for data=cups."""
    scored, score = [], tasks.score
    monkeypatch.setattr(tasks, "score", lambda *given: scored.append(1) or score(*given))
    assert len(data.load_train(configured(num_train=300), "dpo")) == 300
    assert len(scored) < 3 * 300


def test_pairs_are_right_and_wrong_and_the_same_every_time():
    settings = configured(num_train=30)
    pairs, problems = data.load_train(settings, "dpo"), tasks.generate(settings)[0]
    assert pairs.to_list() == data.load_train(settings, "dpo").to_list()
    for pair, problem in zip(pairs, problems, strict=True):
        assert tasks.score(pair["chosen"][0]["content"], problem["entry"]) == 1.0
        assert tasks.score(pair["rejected"][0]["content"], problem["entry"]) < 1.0


def jsonl(tmp_path, *lines):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


@pytest.mark.parametrize(
    ("line", "method", "message"),
    [
        ('{"prompt": "a"', "sft", r"rows.jsonl:3: not a JSON object"),
        ("[1]", "sft", r"rows.jsonl:3: not a JSON object .*a list"),
        (
            '{"prompt": "a"}',
            "sft",
            r"rows.jsonl:3: .*sft needs completion and prompt, or messages, or text",
        ),
        ('{"chosen": "a"}', "dpo", r"rows.jsonl:3: .* dpo needs chosen and rejected"),
        ("{}", "grpo", r"rows.jsonl:3: has the fields \(none\), and grpo needs prompt"),
        ('{"prompt": "a"}', "evaluate", r"rows.jsonl:3: .* evaluate needs answer and prompt"),
        ('{"prompt": ' + "9" * 5000 + "}", "grpo", r"rows.jsonl:3: .*4300 digits"),
        (r'{"text": "\ud83d\ude00", "x": ["\uD83D"]}', "sft", r"rows.jsonl:3: .*\\ud83d"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, method, message):
    good = '{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c", "answer": "b"}'
    with pytest.raises(UserError, match=message):
        data.read_jsonl(jsonl(tmp_path, good, "", line), method)


def test_both_halves_of_a_character_are_one(tmp_path):
    assert data.read_jsonl(jsonl(tmp_path, r'{"text": "\ud83d\ude00 \\ud800"}'), "sft") == [
        {"text": "\U0001f600 \\ud800"}
    ]


MESSAGE, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("read", [{"messages": [MESSAGE, ANSWER]}, {"text": "a b"}])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_beside_messages_is_no_prompt_of_a_completion(tmp_path, read, streaming):
    lines = [json.dumps(read), json.dumps({"prompt": "a", **read})]
    settings = configured(
        name="jsonl", kind="jsonl", path=jsonl(tmp_path, *lines), tasks=[], streaming=streaming
    )
    assert list(itertools.islice(data.load_train(settings, "sft"), 2)) == [read, read]


@pytest.mark.parametrize(
    ("row", "method", "said"),
    [
        (
            {"prompt": "a", "completion": 3},
            "sft",
            "completion is 3, and it must be text or a list of one or more messages "
            "{role, content}.",
        ),
        ({"prompt": None, "completion": "b"}, "sft", "prompt is null, and it must be text or"),
        (
            {"messages": []},
            "sft",
            "messages is [], and it must be a list of one or more messages {role, content}.",
        ),
        ({"messages": "a"}, "sft", 'messages is "a", and'),
        (
            {"messages": [MESSAGE, {"from": "human"}]},
            "sft",
            'messages is a list with {"from": "human"} at place 2, and',
        ),
        ({"messages": [{"role": "user", "content": None}]}, "sft", "messages is a list with"),
        ({"text": [MESSAGE]}, "sft", "text is [{"),
        ({"text": "b" * 99, "prompt": 99}, "sft", "prompt is 99, and"),
        (
            {"text": "a", "messages": [MESSAGE, ANSWER]},
            "sft",
            "has messages, and text, and sft would read one of them. Remove the fields that are "
            "not to be learned.",
        ),
        (
            {"text": "a", "prompt": "a", "completion": "b"},
            "sft",
            "has completion and prompt, and text, and sft would read one of them.",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": None},
            "dpo",
            "rejected is null, and it must be text or",
        ),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "dpo", "prompt is null, and"),
        (
            {"messages": [MESSAGE, ANSWER], "tools": "[{]"},
            "sft",
            'tools is "[{]", and it must be a list of tools, each an object, or its JSON.',
        ),
        ({"messages": [MESSAGE, ANSWER], "tools": ["f"]}, "sft", 'tools is ["f"], and'),
        (
            {"messages": [MESSAGE, ANSWER], "chat_template_kwargs": "a"},
            "sft",
            'chat_template_kwargs is "a", and it must be an object',
        ),
        ({"prompt": {"a": "b" * 99}}, "grpo", "..., and it must be text or"),
        ({"prompt": None, "answer": "1"}, "evaluate", "prompt is null, and"),
        (
            {"prompt": "a", "answer": ["1"]},
            "evaluate",
            'answer is ["1"], and it must be text or a number.',
        ),
        (
            {"prompt": "a", "answer": None},
            "evaluate",
            "answer is null, and it must be text or a number.",
        ),
        (
            {"prompt": "a", "answer": True},
            "evaluate",
            "answer is true, and it must be text or a number.",
        ),
        (
            {"prompt": "a", "answer": ["1"]},
            "grpo",
            'answer is ["1"], and it must be text or a number.',
        ),
        (
            {"prompt": "a", "answer": True},
            "grpo",
            "answer is true, and it must be text or a number.",
        ),
        ({"prompt": "a", "completion": 1, "score": 1}, "samples", "completion is 1, and"),
        (
            {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
            "sft",
            'messages has the role "human" at place 1, and roles are system, developer, user, '
            "assistant, tool. Rename it to user.",
        ),
        (
            {"messages": [MESSAGE, {"role": "GPT", "content": "b"}]},
            "sft",
            'the role "GPT" at place 2, and roles are',
        ),
        (
            {"messages": [MESSAGE, {"role": "asistant", "content": "b"}]},
            "sft",
            "Did you mean assistant?",
        ),
        ({"prompt": [{"role": "function", "content": "a"}]}, "grpo", "Rename it to tool."),
        (
            {"prompt": [{"role": "narrator", "content": "a"}]},
            "grpo",
            "assistant, tool. Rename it to the one that it is.",
        ),
        (
            {"prompt": [{"role": "human", "content": "a"}], "answer": "1"},
            "evaluate",
            'prompt has the role "human" at place 1',
        ),
        (
            {"messages": [MESSAGE]},
            "sft",
            "messages ends with a turn of user, and its last turn must be the assistant's: that "
            "is the answer",
        ),
        ({"messages": [MESSAGE, ANSWER, MESSAGE]}, "sft", "messages ends with a turn of user"),
        (
            {"prompt": [MESSAGE], "completion": [MESSAGE]},
            "sft",
            "completion ends with a turn of user, and",
        ),
        (
            {"prompt": [MESSAGE], "chosen": [ANSWER], "rejected": [MESSAGE]},
            "dpo",
            "rejected ends with a turn of user, and",
        ),
        (
            {"prompt": [{"role": "system", "content": "a"}], "completion": [ANSWER]},
            "sft",
            "prompt ends with a turn of system, and sft needs",
        ),
    ],
)
def test_a_value_of_another_type_is_named_with_its_place(tmp_path, monkeypatch, row, method, said):
    good = {
        "prompt": [MESSAGE],
        "completion": "b",
        "chosen": "b",
        "rejected": "c",
        "answer": 2,
        "score": 1,
    }
    with pytest.raises(UserError) as raised:
        data.read_jsonl(jsonl(tmp_path, json.dumps(good), "", json.dumps(row)), method)
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/rows.jsonl:3: ")
    if method == "samples":
        return
    monkeypatch.setattr(
        data, "_hub_dataset", lambda settings, split, streaming=False: Dataset.from_list([row])
    )
    for streaming in (False, True):
        settings = configured("hub", hub_id="me/rows", streaming=streaming)
        with pytest.raises(UserError, match="me/rows, split train, row 0: "):
            next(iter(data.load_train(settings, method))) if method != "evaluate" else list(
                data._hub(settings, "train", method)
            )


def test_a_null_of_another_form_is_none_and_a_call_needs_no_content(tmp_path):
    called = [MESSAGE, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    for line in (
        {"prompt": None, "messages": called},
        {"prompt": "a", "completion": "", "messages": None, "text": None},
    ):
        given = {name: value for name, value in line.items() if value is not None}
        assert data.load_train(
            configured("jsonl", path=jsonl(tmp_path, json.dumps(line))), "sft"
        ).column_names == list(given)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_what_a_chat_template_writes_beside_messages_is_each_rows_own(tmp_path, method, streaming):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": "int"}}}]
    rows = []
    for n, arguments in enumerate([{"a": 1}, {"b": 2, "c": None}, {"a": "text"}]):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "f", "arguments": arguments}],
        }
        sides = {
            "prompt": [MESSAGE],
            "chosen": [call],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        given = {"messages": [MESSAGE, call]} if method == "sft" else sides
        rows.append(
            given | {"chat_template_kwargs": {"thinks": n}} | ({"tools": tools} if n else {})
        )
    path = jsonl(tmp_path, *map(json.dumps, rows))
    loaded = data.load_train(configured("jsonl", path=path, streaming=streaming), method)
    # a stream has no end
    found = {row["chat_template_kwargs"]["thinks"]: row for row in itertools.islice(loaded, 100)}
    for n, given in enumerate(rows):
        row = found[n]
        calling = "messages" if method == "sft" else "chosen"
        assert row[calling][-1]["tool_calls"] == given[calling][-1]["tool_calls"]
        assert row["chat_template_kwargs"] == given["chat_template_kwargs"]
        assert (json.loads(row["tools"]) if row.get("tools") else None) == given.get("tools")


def test_settings_of_a_template_that_some_rows_lack_are_refused(tmp_path):
    lines = [
        json.dumps({"messages": [MESSAGE, ANSWER]} | own)
        for own in ({"chat_template_kwargs": {"thinks": True}}, {})
    ]
    with pytest.raises(UserError, match="others messages .messages. and chat_template_kwargs"):
        data.load_train(configured("jsonl", path=jsonl(tmp_path, *lines)), "sft")


def test_a_missing_file_names_its_neighbours(tmp_path):
    jsonl(tmp_path, "{}")
    with pytest.raises(UserError, match="no such file. Did you mean rows.jsonl"):
        data.read_jsonl(str(tmp_path / "row.jsonl"), "sft")
    with pytest.raises(UserError, match="Give the path of an existing file"):
        data.read_jsonl("/nowhere/at/all.jsonl", "sft")


def test_local_files_are_read_as_they_are(tmp_path):
    path = jsonl(tmp_path, '{"prompt": "1+1=", "completion": "2", "answer": "2"}')
    settings = configured("jsonl", path=path, heldout_path=path)
    assert data.load_train(settings, "sft").to_list() == [{"prompt": "1+1=", "completion": "2"}]
    assert data.load_heldout(settings)[0]["answer"] == "2"


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": f"{n}", "answer": n} for n in range(5)],
        [
            {"prompt": "a", "answer": 1},
            {"prompt": "b"},
            {"prompt": "c", "answer": 2.5},
            {"prompt": "d", "note": ["x"]},
        ],
        [
            {"prompt": [MESSAGE]},
            {"prompt": [MESSAGE | {"name": "me"}], "note": {"a": 1}},
            {"prompt": [MESSAGE], "note": {"b": "c"}},
        ],
        [
            {"prompt": [MESSAGE]},
            {"prompt": [MESSAGE, CALL, MESSAGE]},
            {"prompt": [MESSAGE], "answer": "1"},
        ],
    ],
)
def test_rows_read_in_pieces_are_those_read_at_once(tmp_path, monkeypatch, rows):
    settings = configured("jsonl", path=jsonl(tmp_path, *map(json.dumps, rows)))
    whole = data.load(settings, "grpo")
    monkeypatch.setattr(data, "PIECE", 1)
    pieces = data.load(settings, "grpo")
    assert pieces.rows.to_list() == whole.rows.to_list()
    assert pieces.rows.features == whole.rows.features
    assert pieces.counts == whole.counts
    assert pieces.sha256() == whole.sha256()


def test_values_of_two_kinds_in_two_pieces_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 1)
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "1"}]
    with pytest.raises(UserError, match="no table column holds the values of a field"):
        data.load(configured("jsonl", path=jsonl(tmp_path, *map(json.dumps, rows))), "grpo")


def test_a_tokenizer_is_trained_on_rows_from_all_of_a_large_table(monkeypatch):
    monkeypatch.setattr(data, "LARGE_TABLE", 10)
    monkeypatch.setattr(data, "TOKENIZER_ROWS", 3)
    rows = Dataset.from_dict({"text": [str(n) for n in range(12)]})
    assert data.texts(rows) == ["0", "4", "8"]
    assert data.texts(rows.select(range(10))) == [str(n) for n in range(10)]


def test_a_limit_takes_the_first_of_what_a_method_is_about():
    """Limit an evaluation's held-out rows, but not those of a training."""
    whole, first = (
        data.load_heldout(configured(num_train=5, num_heldout=6, limit=limit))
        for limit in (None, 2)
    )
    assert (len(whole), first) == (6, whole[:2])
    limited = configured(num_train=5, num_heldout=6, limit=2)
    assert (len(data.load_train(limited, "sft")), len(data.load_heldout_table(limited, "sft"))) == (
        2,
        6,
    )


@pytest.mark.parametrize(
    ("name", "load", "message"),
    [
        ("jsonl", lambda d: data.load_train(d, "sft"), "data.path is empty"),
        ("jsonl", data.load_heldout, "data.heldout_path is empty"),
        ("hub", lambda d: data.load_train(d, "sft"), "needs data.hub_id and data.revision"),
        ("hub", data.load_heldout, "data.heldout_split is empty"),
    ],
)
def test_what_is_not_given_is_asked_for(name, load, message):
    with pytest.raises(UserError, match=message):
        load(configured(name))


def test_empty_sets_are_refused(tmp_path):
    with pytest.raises(UserError, match="no rows to train on"):
        data.load_train(configured("jsonl", path=jsonl(tmp_path, "")), "sft")
    with pytest.raises(UserError, match="no held-out rows"):
        data.load_heldout(configured(num_train=5, num_heldout=0))


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="could not be had"):
        data.load_train(configured("hub", hub_id="nobody/nothing", revision="0" * 40), "sft")


def test_texts_are_everything_a_tokenizer_must_spell():
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "completion": "b", "answer": "no"},
        {"messages": [{"content": "c"}]},
    ]
    assert data.texts(rows) == ["a", "b", "c"]


def test_a_module_that_few_tasks_need_is_imported_by_those():
    assert reasoning_gym.create_dataset("game_of_life", size=1, seed=1)[0]["answer"]
    later = Later("html.entities")
    assert not hasattr(later, "__file__")
    assert later.name2codepoint["amp"] == 38
