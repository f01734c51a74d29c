"""Test the choice of rows: filters, duplicates, a stable split, shares, pairs and streams."""

import itertools
import json
from collections import Counter

import pytest
from datasets import Dataset
from omegaconf import OmegaConf
from trl.data_utils import extract_prompt

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.schema import Data
from recipes.data import data, data_select


def rows(number, **fields):
    return [
        {
            "prompt": f"What is {n}?",
            "completion": str(n),
            "answer": str(n),
            "level": n % 3,
            **fields,
        }
        for n in range(number)
    ]


def jsonl(path, content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def configured(**own):
    settings = OmegaConf.merge(plain(Data(name="jsonl", kind="jsonl")), own)
    OmegaConf.set_struct(settings, True)  # as a rank reads them
    return settings


def test_filters_leave_out_and_count(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(30))
    found = data.load(
        configured(
            path=path,
            filter={"levels": [0, 1], "regex": {"prompt": "[5-9]"}, "equals": {"answer": "15"}},
        ),
        "sft",
    )
    assert found.rows.to_list() == [{"prompt": "What is 15?", "completion": "15"}]
    assert found.counts["filtered"]["levels"] == 10
    assert (
        found.counts["read"] == 30 == found.counts["rows"] + sum(found.counts["filtered"].values())
    )
    with pytest.raises(
        UserError,
        match=r"data.filter.equals.anser: a row has no field 'anser'. Did you mean answer",
    ):
        data.load(configured(path=path, filter={"equals": {"anser": 1}}), "sft")


def test_who_says_it_and_what_is_called_make_a_difference():
    def said(role, **more):
        return {
            "messages": [
                {"role": role, "content": "Go", **more},
                {"role": "assistant", "content": "Yes"},
            ]
        }

    different = [said("user"), said("system"), said("user", tool_calls=[{"name": "f"}])]
    assert list(data_select.without_duplicates([*different, *different], "exact", {})) == different


def test_duplicates():
    same = [{"text": "Add 1-2"}, {"text": "add  1-2 "}, {"text": "add 1+2"}, {"text": "Add 1-2"}]
    counts = [{}, {}, {}]
    kept = [
        list(data_select.without_duplicates(same, *each))
        for each in zip(("none", "exact", "normalized"), counts, strict=True)
    ]
    assert [len(rows) for rows in kept] == [4, 3, 2]
    assert counts == [{}, {"duplicates": 1}, {"duplicates": 2}]


def test_heldout_rows_stay_held_out_when_rows_are_added(tmp_path):
    def split(number):
        settings = configured(
            path=jsonl(tmp_path / f"{number}.jsonl", rows(number)), heldout_fraction=0.2
        )
        trained = {row["prompt"] for row in data.load_train(settings, "sft")}
        return trained, {row["prompt"] for row in data.load_heldout(settings)}

    (few, few_held), (many, many_held) = split(200), split(1000)
    assert few < many
    assert few_held < many_held
    assert not many & many_held
    assert len(many | many_held) == 1000
    assert 160 < len(many_held) < 240  # 200 expected, three standard deviations are 38
    assert data_select.is_heldout({"prompt": "a  B"}, 0.5) == data_select.is_heldout(
        {"messages": [{"role": "user", "content": "A b"}]}, 0.5
    )


def test_pairs_without_a_prompt_are_split_by_what_their_sides_share(tmp_path):
    def conversation(n, answer):
        asked = [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"What is {n} plus 1?"},
        ]
        return [*asked, {"role": "assistant", "content": answer}]

    pairs = [
        {"chosen": conversation(n, f"{n + 1}{end}"), "rejected": conversation(n, f"0{end}")}
        for n in range(40)
        for end in ".! "
    ]
    settings = configured(path=jsonl(tmp_path / "a.jsonl", pairs), heldout_fraction=0.3)
    trained, held_out = (
        {row["chosen"][1]["content"] for row in of}
        for of in (data.load_train(settings, "dpo"), data.load_heldout_table(settings, "dpo"))
    )
    assert held_out
    assert not trained & held_out
    # on the side of the same question in TRL's explicit format, and as TRL takes it out
    for n, pair in enumerate(pairs):
        prompt = extract_prompt(pair)["prompt"]
        assert (
            data_select.question(pair)
            == data_select.question({"prompt": prompt})
            == f"Add.\0What is {n // 3} plus 1?"
        )
    assert data_select.question({"chosen": "1+1=2", "rejected": "1+1=3"}) == "1+1="
    assert data_select.question({"chosen": "a b", "rejected": "a"}) == "a"
    # nothing is shared, so all of it
    assert data_select.question({"chosen": "a", "rejected": "b"}) == "chosen\0a\0rejected\0b"


def test_heldout_rows_in_the_format_of_a_trainer(tmp_path):
    """Return sft's as it reads them, also without an answer, and dpo's as pairs."""
    plain_rows = [{"prompt": f"What is {n}?", "completion": str(n)} for n in range(60)]
    settings = configured(path=jsonl(tmp_path / "a.jsonl", plain_rows), heldout_fraction=0.2)
    held_out = data.load_heldout_table(settings, "sft")
    assert held_out.column_names == ["prompt", "completion"]
    assert {row["prompt"] for row in plain_rows} - {
        row["prompt"] for row in data.load_train(settings, "sft")
    } == set(held_out["prompt"])
    pairs = jsonl(
        tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c", "note": "d"}]
    )
    assert data.load_heldout_table(configured(heldout_path=pairs), "dpo").to_list() == [
        {"prompt": "a", "chosen": "b", "rejected": "c"}
    ]
    with pytest.raises(
        UserError,
        match=r"a.jsonl:1: has the fields completion, prompt, and dpo needs chosen and rejected",
    ):
        data.load_heldout_table(configured(heldout_path=settings.path), "dpo")


def test_filters_apply_to_heldout_rows_wherever_they_come_from(tmp_path, monkeypatch):
    path, filters = (
        jsonl(tmp_path / "a.jsonl", rows(9)),
        {"levels": [0], "regex": {"prompt": "[0-5]", "completion": "."}},
    )
    evaluated = jsonl(
        tmp_path / "b.jsonl",
        [{key: row[key] for key in ("prompt", "answer", "level")} for row in rows(9)],
    )
    assert [
        row["answer"]
        for row in data.load_heldout(configured(heldout_path=evaluated, filter=filters))
    ] == ["0", "3"]
    assert [
        row["answer"]
        for row in data.load_heldout(configured(heldout_path=evaluated, filter=filters, limit=1))
    ] == ["0"]
    assert data.load_heldout_table(configured(heldout_path=path, filter=filters), "sft")[
        "completion"
    ] == ["0", "3"]
    monkeypatch.setattr(
        data, "_hub_dataset", lambda settings, split, streaming=False: Dataset.from_list(rows(9))
    )
    assert data.load_heldout_table(
        configured(kind="hub", heldout_split="test", filter=filters), "sft"
    )["completion"] == ["0", "3"]
    tasks = [
        {"name": name, "level": level, "weight": 1.0, "worked": 0.0, "config": {}}
        for name, level in (("chain_sum", 1), ("gcd", 0))
    ]
    made = {"kind": "reasoning", "tasks": tasks, "num_train": 8, "num_heldout": 8}
    for chosen in ({"tasks": ["gcd"]}, {"levels": [0]}):
        assert {row["task"] for row in data.load_heldout(configured(**made, filter=chosen))} == {
            "gcd"
        }
    with pytest.raises(
        UserError, match=r"data.filter leaves none of 9 held-out rows: \{'levels': 9\}. Loosen it"
    ):
        data.load_heldout(configured(heldout_path=path, filter={"levels": [7]}))
    with pytest.raises(UserError, match="a row has no field 'anser'. Did you mean answer"):
        data.load_heldout(configured(heldout_path=path, filter={"equals": {"anser": 1}}))
    assert data.load_heldout_table(configured(heldout_path=evaluated, filter=filters), "grpo")[
        "answer"
    ] == ["0", "3"]


def test_an_empty_heldout_split_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"heldout_fraction=0.001 of 4 rows: the held-out split is empty. Raise it"
    ):
        data.load_heldout(
            configured(path=jsonl(tmp_path / "a.jsonl", rows(4)), heldout_fraction=0.001)
        )


def test_a_mix_has_exact_shares_and_is_the_same_every_time(tmp_path):
    small, large = (
        jsonl(tmp_path / f"{name}.jsonl", rows(n, completion=name))
        for name, n in (("small", 10), ("large", 90))
    )
    settings = configured(
        kind="mix", sources=[{"path": small, "weight": 0.25}, {"path": large, "weight": 0.75}]
    )
    found = data.load_train(settings, "sft").to_list()
    assert Counter(row["completion"] for row in found) == {"small": 25, "large": 75}
    assert set(
        Counter(row["prompt"] for row in found if row["completion"] == "small").values()
    ) == {2, 3}
    assert (
        max(Counter(row["prompt"] for row in found if row["completion"] == "large").values()) == 1
    )
    assert found == data.load_train(settings, "sft").to_list()
    assert data_select.quotas(10, [1 / 3, 1 / 3, 1 / 3]) == [4, 3, 3]


def test_fields_that_only_later_rows_have_are_kept_and_formats_are_not_mixed(tmp_path):
    few, many = (
        jsonl(tmp_path / "few.jsonl", [{"prompt": "a"}]),
        jsonl(tmp_path / "many.jsonl", [{"prompt": "b", "answer": "1"}]),
    )
    settings = configured(
        kind="mix", sources=[{"path": few, "weight": 0.5}, {"path": many, "weight": 0.5}]
    )
    assert {row["prompt"]: row["answer"] for row in data.load(settings, "grpo").rows} == {
        "a": None,
        "b": "1",
    }
    mixed = jsonl(tmp_path / "mixed.jsonl", [{"text": "a"}, {"prompt": "a", "completion": "b"}])
    with pytest.raises(
        UserError,
        match=r"some rows have prompt \(text\) and completion \(text\), others text \(text\)",
    ):
        data.load(configured(path=mixed), "sft")
    large = jsonl(tmp_path / "large.jsonl", [{"prompt": "a", "seed": 10**30}])
    with pytest.raises(UserError, match="integers of 64 bits"):
        data.load(configured(path=large), "grpo")
    odd = jsonl(
        tmp_path / "odd.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": "x"}]
    )
    with pytest.raises(UserError, match="no table column holds the values of a field"):
        data.load(configured(path=odd), "grpo")


def test_weights_that_are_one_but_for_digits_make_a_stream(tmp_path):
    sources = [
        {"path": jsonl(tmp_path / f"{n}.jsonl", rows(2)), "weight": 0.3333333} for n in range(3)
    ]
    stream = data.load_train(
        configured(kind="mix", streaming=True, shuffle_buffer=1, sources=sources), "sft"
    )
    assert len(list(itertools.islice(stream, 5))) == 5


def test_the_limit_of_a_streamed_mix_is_of_the_mix(tmp_path):
    sources = [
        {
            "path": jsonl(tmp_path / f"{n}.jsonl", [{"text": f"{n} {row}"} for row in range(90)]),
            "weight": 0.5,
        }
        for n in range(2)
    ]
    settings = configured(kind="mix", streaming=True, shuffle_buffer=1, limit=10, sources=sources)
    first = [row["text"] for row in itertools.islice(data.load_train(settings, "sft"), 40)]
    assert len(set(first)) == 10
    assert {text[0] for text in first} == {"0", "1"}
    assert all(
        Counter(first[start : start + 10]) == Counter(first[:10]) for start in (10, 20, 30)
    ), "the same rows again"
    assert first == [row["text"] for row in itertools.islice(data.load_train(settings, "sft"), 40)]


def test_balance(tmp_path):
    uneven = [{**row, "task": "rare" if n < 3 else "usual"} for n, row in enumerate(rows(30))]
    found = data.load(configured(path=jsonl(tmp_path / "a.jsonl", uneven), balance="task"), "grpo")
    assert found.counts["by_task"] == {"rare": 15, "usual": 15}
    with pytest.raises(UserError, match="data.balance=task: a row has no field 'task'"):
        data.load(configured(path=jsonl(tmp_path / "b.jsonl", rows(3)), balance="task"), "grpo")


def test_balance_of_levels_of_two_kinds_and_without_one(tmp_path):
    def of(*levels):
        made = [
            {**row, "level": level} for row, level in zip(rows(len(levels)), levels, strict=True)
        ]
        return configured(path=jsonl(tmp_path / "a.jsonl", made), balance="level")

    assert data.load(of(2, "hard", 10, "2", 10, "hard"), "sft").counts["by_level"] == {
        "10": 2,
        "2": 2,
        "hard": 2,
    }
    with pytest.raises(UserError, match=r"data.balance=level: .*null"):
        data.load(of(1, None), "sft")


def sample(prompt, completion, score):
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": completion,
        "score": score,
    }


def test_pairs_are_of_the_best_and_the_worst_and_differ(tmp_path):
    samples = [
        sample("a", "right", 1.0),
        sample("a", "half", 0.5),
        sample("a", "wrong", 0.0),
        sample("a", "near", 0.75),
    ]
    samples += [
        sample("b", "x", 0.0),
        sample("b", "y", 0.0),
        sample("c", "same", 1.0),
        sample("c", "same", 1.0),
    ]
    path = jsonl(tmp_path / "a.jsonl", samples)
    found = data.load(configured(kind="samples", path=path, pairs_per_prompt=4), "dpo")
    answers = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in found.rows]
    assert answers == [("right", "wrong"), ("near", "half")]
    assert found.rows[0]["chosen"][0]["role"] == "assistant"
    assert found.counts["prompts_without_pair"] == {"equal scores": 1, "one answer": 1}
    with pytest.raises(UserError, match=r"no preference pair: .*equal scores.*sample more of each"):
        data.load(configured(kind="samples", path=jsonl(tmp_path / "b.jsonl", samples[4:])), "dpo")


def test_a_smoke_run_makes_pairs_of_what_random_weights_say():
    """Make them although every answer is wrong and cut off."""
    said = [
        {"prompt": "a", "completion": text, "score": 0.0, "finished": False}
        for text in ("x", "y", "z", "x")
    ]
    pairs, skipped = data_select.pairs_of_samples(said, 2, of_any=True)
    # the third has no partner
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("x", "z")]
    assert not skipped
    assert data_select.pairs_of_samples(said, 2) == ([], {"all cut off": 1})


def test_a_pair_with_equal_sides_is_refused_with_its_line(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        [
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": "b"},
        ],
    )
    with pytest.raises(
        UserError,
        match=r"a.jsonl:2: chosen and rejected are equal, so nothing is preferred. Remove the row",
    ):
        data.load_train(configured(path=path), "dpo")


def test_sides_that_differ_in_spaces_only_are_equal_and_those_that_differ_in_a_call_are_not(
    tmp_path,
):
    def side(content, **more):
        return [{"role": "assistant", "content": content, **more}]

    calls = [side("", tool_calls=[{"name": name}]) for name in "fg"]
    assert not data.select.has_equal_sides({"chosen": calls[0], "rejected": calls[1]})
    for chosen, rejected in (("b", "b \n"), (side("b"), side(" b"))):
        assert data.select.has_equal_sides({"chosen": chosen, "rejected": rejected})


def test_pairs_are_made_of_samples_that_ended_and_differ_in_more_than_spaces():
    def sample(text, score, **more):
        return {"prompt": "1+1=", "completion": text, "score": score, **more}

    cut = [sample("2", 1.0, finished=True), sample("so 1", 0.0, finished=False)]
    assert data.select.pairs_of_samples(cut, 1) == ([], {"one answer": 1})
    assert data.select.pairs_of_samples(cut[1:], 1) == ([], {"all cut off": 1})
    assert data.select.pairs_of_samples([sample("2", 1.0), sample("2 ", 0.0)], 1) == (
        [],
        {"one answer": 1},
    )
    messages = sample([{"role": "assistant", "content": "2"}], 1.0)  # and the prompt is text
    assert data.select.pairs_of_samples([messages, sample("3", 0.0)], 1)[0] == [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    ]
    roles = [
        {**sample("2", float(role == "user")), "prompt": [{"role": role, "content": "1+1="}]}
        for role in ("user", "system")
    ]
    assert data.select.pairs_of_samples(roles, 1) == ([], {"one answer": 2}), "two prompts"


@pytest.mark.parametrize("score", [None, "1", True, float("nan")])
def test_a_sample_whose_score_is_no_number_is_refused(tmp_path, score):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "score": score}])
    with pytest.raises(UserError, match=r"a.jsonl:1: score is .*Give a number"):
        data.load(configured(kind="samples", path=path), "dpo")


def test_rows_of_text_and_of_messages_do_not_mix(tmp_path):
    said = {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }
    text, messages = {"prompt": "a", "completion": "b"}, jsonl(tmp_path / "b.jsonl", [said])
    path = jsonl(tmp_path / "a.jsonl", [text, text, said])
    for streaming in (False, True):
        rows = configured(path=path, streaming=streaming, shuffle_buffer=1)
        with pytest.raises(
            UserError, match=r"some rows have prompt \(messages\) .*others prompt \(text\)"
        ):
            list(itertools.islice(data.load_train(rows, "sft"), 3))
        with pytest.raises(
            UserError, match=r"some rows have prompt \(messages\), others prompt \(text\)"
        ):
            list(itertools.islice(data.load_train(rows, "grpo"), 3))
    sources = [
        {"path": jsonl(tmp_path / "c.jsonl", [text]), "weight": 0.5},
        {"path": messages, "weight": 0.5},
    ]
    with pytest.raises(UserError, match="some rows have prompt"):
        data.load_train(configured(kind="mix", streaming=True, sources=sources), "sft")


def test_a_stream_reads_no_more_than_it_needs_goes_on_for_ever_and_is_the_same_again(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*rows(50)])
    with open(path, "a") as file:
        file.write("not JSON\n")
    settings = configured(
        path=path, streaming=True, shuffle_buffer=4, limit=30, filter={"levels": [0, 1]}
    )
    stream = data.load_train(settings, "sft")
    first = list(itertools.islice(stream, 60))  # two passes of 30: the bad line lies behind them
    assert {row["prompt"] for row in first} <= {
        row["prompt"] for row in rows(50) if row["level"] < 2
    }
    assert first == list(itertools.islice(data.load_train(settings, "sft"), 60))
    path = jsonl(tmp_path / "b.jsonl", rows(3))
    with pytest.raises(UserError, match="no rows to train on"):
        next(
            iter(
                data.load_train(
                    configured(
                        path=path, streaming=True, limit=1, filter={"equals": {"answer": "x"}}
                    ),
                    "sft",
                )
            )
        )


def test_rows_that_differ_in_what_a_template_writes_are_two():
    row = {"messages": [{"role": "user", "content": "a"}]}
    found = {
        data_select.content(row | own)
        for own in (
            {},
            {"tools": [{"name": "f"}]},
            {"tools": [{"name": "g"}]},
            {"chat_template_kwargs": {"thinks": True}},
        )
    }
    assert len(found) == 4


def test_rows_with_nothing_in_a_field_are_counted(tmp_path):
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    asked, nothing = {"role": "user", "content": "a"}, {"role": "assistant", "content": " "}
    plain_rows = [{"prompt": "a", "completion": text} for text in ("b", "", " \n")]
    path = jsonl(tmp_path / "a.jsonl", plain_rows)
    assert data.load(configured(path=path), "sft").counts["blank"] == {"completion": 2}
    chats = [
        {"messages": [asked, last]}
        for last in (called, nothing, {"role": "assistant", "content": "b"})
    ]
    assert data.load(configured(path=jsonl(tmp_path / "b.jsonl", chats)), "sft").counts[
        "blank"
    ] == {"messages": 1}
    assert "blank" not in data.load(configured(path=path), "grpo").counts


def test_held_out_rows_that_ask_what_is_trained_on_are_counted_in_one_line(tmp_path, capsys):
    train = [
        {"prompt": "What is 1?", "completion": "1"},
        {"messages": [{"role": "user", "content": "What is 2?"}]},
        {"prompt": 3},
        {},
    ]
    heldout = [
        {"prompt": text, "answer": "1"} for text in ("what  is 1?", "What is 2?", "What is 3?")
    ]
    own = {
        "path": jsonl(tmp_path / "a.jsonl", train),
        "heldout_path": jsonl(tmp_path / "b.jsonl", heldout),
    }
    assert len(data.load_heldout(configured(**own))) == 3
    said = capsys.readouterr().out
    assert said.startswith(
        f"warning: 2 of 3 rows of data.heldout_path={tmp_path}/b.jsonl ask what rows of "
        f"data.path={tmp_path}/a.jsonl ask,"
    )
    assert said.count("\n") == 1
    jsonl(tmp_path / "a.jsonl", train[2:])
    data.load_heldout(configured(**own))
    assert capsys.readouterr().out == ""
