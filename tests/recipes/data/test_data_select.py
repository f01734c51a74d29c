"""Test filters, duplicates, the stable held-out split, mixes, pairs and streams."""

import itertools
from collections import Counter

import pytest
from trl.data_utils import extract_prompt

from launch.core import row_check
from launch.core.errors import UserError
from recipes.data import data_select
from recipes.data.data_load import load, load_heldout, load_heldout_table
from tests.helpers.data_rows import data_config, jsonl


def rows(number, **fields):
    return [
        {"prompt": f"What is {n}?", "completion": str(n), "answer": str(n), "level": n % 3} | fields
        for n in range(number)
    ]


def configured(**own):
    return data_config("jsonl", **own)


def test_filters_count_rejected_rows(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(30))
    filters = {"levels": [0, 1], "regex": {"prompt": "[5-9]"}, "equals": {"answer": "15"}}
    loaded = load(configured(path=path, filter=filters), "sft")
    assert loaded.rows.to_list() == [{"prompt": "What is 15?", "completion": "15"}]
    filtered = loaded.counts["filtered"]
    assert filtered["levels"] == 10
    assert loaded.counts["read"] == 30 == loaded.counts["rows"] + sum(filtered.values())
    for function in (lambda settings: load(settings, "sft"), load_heldout):
        settings = configured(path=path, heldout_path=path, filter={"equals": {"anser": 1}})
        with pytest.raises(UserError, match=r"data.filter.equals.anser: .*Did you mean answer"):
            function(settings)


def test_duplicates_are_dropped():
    texts = [{"text": "Add 1-2"}, {"text": "add  1-2 "}, {"text": "add 1+2"}, {"text": "Add 1-2"}]
    for how, remaining in (("none", 4), ("exact", 3), ("normalized", 2)):
        counts = {}
        assert len(list(data_select.without_duplicates(texts, how, counts))) == remaining
        assert counts.get("duplicates", 0) == 4 - remaining


def test_rows_with_other_roles_calls_or_tools_are_no_duplicates():
    def row(role, own=None, **message):
        turns = [{"role": role, "content": "Go", **message}, {"role": "assistant", "content": "Y"}]
        return {"messages": turns, **(own or {})}

    different = [
        row("user"),
        row("system"),
        row("user", tool_calls=[{"name": "f"}]),
        row("user", {"tools": [{"name": "f"}]}),
        row("user", {"chat_template_kwargs": {"thinks": True}}),
    ]
    assert list(data_select.without_duplicates(different * 2, "exact", {})) == different


def test_added_rows_do_not_change_the_heldout_split(tmp_path):
    def split(number):
        path = jsonl(tmp_path / f"{number}.jsonl", rows(number))
        settings = configured(path=path, heldout_fraction=0.2)
        trained = {row["prompt"] for row in load(settings, "sft").rows}
        table = load_heldout_table(settings, "sft")
        assert table.column_names == ["prompt", "completion"]
        assert set(table["prompt"]) == {row["prompt"] for row in load_heldout(settings)}
        return trained, set(table["prompt"])

    (few, few_heldout), (many, many_heldout) = split(200), split(1000)
    assert few < many
    assert few_heldout < many_heldout
    assert not many & many_heldout
    assert len(many | many_heldout) == 1000
    assert 160 < len(many_heldout) < 240  # 200 expected, three standard deviations are 38
    assert data_select.is_heldout({"prompt": "a  B"}, 0.5) == data_select.is_heldout(
        {"messages": [{"role": "user", "content": "A b"}]}, 0.5
    )
    path = jsonl(tmp_path / "a.jsonl", rows(4))
    with pytest.raises(UserError, match="data.heldout_fraction"):
        load_heldout(configured(path=path, heldout_fraction=0.001))


def test_pairs_without_a_prompt_are_split_by_their_common_beginning(tmp_path):
    def conversation(n, answer):
        question = {"role": "user", "content": f"What is {n} plus 1?"}
        system = {"role": "system", "content": "Add."}
        return [system, question, {"role": "assistant", "content": answer}]

    pairs = [
        {"chosen": conversation(n, f"{n + 1}{end}"), "rejected": conversation(n, f"0{end}")}
        for n in range(40)
        for end in ".! "
    ]
    settings = configured(path=jsonl(tmp_path / "a.jsonl", pairs), heldout_fraction=0.3)
    trained, heldout = (
        {row["chosen"][1]["content"] for row in table}
        for table in (
            load(settings, "dpo").rows,
            load_heldout_table(settings, "dpo"),
        )
    )
    assert heldout
    assert not trained & heldout
    # The split agrees with that of the same pair in TRL's explicit format.
    for pair in pairs[::7]:
        explicit = {"prompt": extract_prompt(pair)["prompt"]}
        assert data_select.question(pair) == data_select.question(explicit)
    assert data_select.question({"chosen": "1+1=2", "rejected": "1+1=3"}) == "1+1="
    assert data_select.question({"chosen": "a", "rejected": "b"}) == "chosen\0a\0rejected\0b"


def test_conversations_are_split_alike_for_every_method(tmp_path):
    roles = ("system", "assistant", "user", "assistant", "user")
    words = ("Add.", "Hello!", "Add {}.", "{}?", "Yes, {}.")
    chats = [
        [{"role": role, "content": text.format(n)} for role, text in zip(roles, words, strict=True)]
        for n in range(40)
    ]
    answer, other = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    forms = {
        "sft": [{"messages": chat + answer} for chat in chats],
        "grpo": [{"prompt": chat} for chat in chats],
        "dpo": [{"chosen": chat + answer, "rejected": chat + other} for chat in chats],
    }
    heldout = {}
    for method, conversations in forms.items():
        path = jsonl(tmp_path / f"{method}.jsonl", conversations)
        table = load_heldout_table(configured(path=path, heldout_fraction=0.3), method)
        [first, *_] = (name for name in ("messages", "prompt", "chosen") if name in table.features)
        heldout[method] = {row[first][2]["content"] for row in table}
    assert 0 < len(heldout["sft"]) < 40
    assert heldout["sft"] == heldout["grpo"] == heldout["dpo"]


def test_heldout_rows_are_filtered_and_checked(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(9))
    filters = {"levels": [0], "regex": {"prompt": "[0-5]", "completion": "."}}
    problems = [{key: row[key] for key in ("prompt", "answer", "level")} for row in rows(9)]
    evaluated = jsonl(tmp_path / "b.jsonl", problems)  # no completion, so its filter passes
    for limit, answers in ((None, ["0", "3"]), (1, ["0"])):
        settings = configured(heldout_path=evaluated, filter=filters, limit=limit)
        assert [row["answer"] for row in load_heldout(settings)] == answers
    settings = configured(heldout_path=path, filter=filters)
    assert list(load_heldout_table(settings, "sft")["completion"]) == ["0", "3"]
    assert list(load_heldout_table(settings, "grpo")["answer"]) == ["0", "3"]
    with pytest.raises(UserError, match=r"data.filter.*'levels': 9"):
        load_heldout(configured(heldout_path=path, filter={"levels": [7]}))
    with pytest.raises(UserError, match=r"a.jsonl:1: .*dpo needs chosen\+rejected"):
        load_heldout_table(settings, "dpo")


def mix(tmp_path, contents, weights, **own):
    sources = [
        {"path": jsonl(tmp_path / f"{n}.jsonl", content), "weight": weight}
        for n, (content, weight) in enumerate(zip(contents, weights, strict=True))
    ]
    return configured(kind="mix", sources=sources, **own)


def test_a_mix_has_exact_shares_and_is_reproducible(tmp_path):
    contents = [rows(10, completion="small"), rows(90, completion="large")]
    settings = mix(tmp_path, contents, [0.25, 0.75])
    mixed = load(settings, "sft").rows.to_list()
    assert Counter(row["completion"] for row in mixed) == {"small": 25, "large": 75}
    repeats = {
        name: set(Counter(row["prompt"] for row in mixed if row["completion"] == name).values())
        for name in ("small", "large")
    }
    assert repeats == {"small": {2, 3}, "large": {1}}
    assert mixed == load(settings, "sft").rows.to_list()
    assert data_select.quotas(10, [1 / 3, 1 / 3, 1 / 3]) == [4, 3, 3]


@pytest.mark.parametrize("streaming", [False, True])
def test_mixed_formats_are_rejected(tmp_path, streaming):
    messages = {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }
    text, whole = {"prompt": "a", "completion": "b"}, {"text": "a b"}
    for others in (messages, whole):
        path = jsonl(tmp_path / "a.jsonl", [text, text, others])
        settings = configured(path=path, streaming=streaming, shuffle_buffer=1)
        with pytest.raises(UserError, match="some rows have .*, others "):
            list(itertools.islice(load(settings, "sft").rows, 3))
    with pytest.raises(UserError, match="some rows have prompt"):
        load(mix(tmp_path, [[text], [messages]], [0.5, 0.5], streaming=streaming), "sft")


def test_the_limit_applies_to_an_entire_streamed_mix(tmp_path):
    contents = [[{"text": f"{n} {row}"} for row in range(90)] for n in range(3)]
    # The weights add up to 1 only after rounding, which NumPy does not accept.
    own = {"streaming": True, "shuffle_buffer": 1, "limit": 12}
    settings = mix(tmp_path, contents, [0.3333333] * 3, **own)
    first = [row["text"] for row in itertools.islice(load(settings, "sft").rows, 36)]
    assert len(set(first)) == 12
    assert {text[0] for text in first} == {"0", "1", "2"}
    assert Counter(first[:12]) == Counter(first[12:24]) == Counter(first[24:])
    assert first == [row["text"] for row in itertools.islice(load(settings, "sft").rows, 36)]


def test_balance(tmp_path):
    def balanced(by, *values):
        uneven = [{**row, by: value} for row, value in zip(rows(len(values)), values, strict=True)]
        path = jsonl(tmp_path / "a.jsonl", uneven)
        return load(configured(path=path, balance=by), "sft").counts[f"by_{by}"]

    assert balanced("task", "rare", *["usual"] * 9) == {"rare": 5, "usual": 5}
    levels = balanced("level", 2, "hard", 10, "2", 10, "hard")
    assert levels == {"10": 2, "2": 2, "hard": 2}
    with pytest.raises(UserError, match=r"data.balance=level: .*level"):
        balanced("level", 1, None)


def sample(prompt, completion, score, **more):
    prompt = [{"role": "user", "content": prompt}]
    return {"prompt": prompt, "completion": completion, "score": score, **more}


def test_the_best_sample_is_paired_with_the_worst(tmp_path):
    scores = [("right", 1.0), ("half", 0.5), ("wrong", 0.0), ("near", 0.75)]
    useless = [("b", "x", 0.0), ("b", "y", 0.0), ("c", "same", 1.0), ("c", "same ", 0.0)]
    samples = [sample("a", *each) for each in scores] + [sample(*each) for each in useless]
    path = jsonl(tmp_path / "a.jsonl", samples)
    loaded = load(configured(kind="samples", path=path, pairs_per_prompt=4), "dpo")
    answers = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in loaded.rows]
    assert answers == [("right", "wrong"), ("near", "half")]
    assert loaded.rows[0]["chosen"][0]["role"] == "assistant"
    assert loaded.counts["prompts_without_pair"] == {"equal scores": 1, "one answer": 1}
    with pytest.raises(UserError, match=r"equal scores"):
        load(configured(kind="samples", path=jsonl(tmp_path / "b.jsonl", samples[4:])), "dpo")


def test_pairs_omit_truncated_samples_except_in_smoke_runs():
    truncated = [sample("a", text, 0.0, finished=False) for text in "xyzx"]
    assert data_select.pairs_of_samples(truncated, 2) == ([], {"all cut off": 1})
    whole = sample("a", "2", 1.0, finished=True)
    assert data_select.pairs_of_samples([whole, *truncated], 2) == ([], {"one answer": 1})
    pairs, skipped = data_select.pairs_of_samples(truncated, 2, any_scores=True)
    sides = [(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in pairs]
    assert (sides, skipped) == ([("x", "z")], {})  # the third text has no partner


def test_equal_sides_are_rejected(tmp_path):
    def side(content, **more):
        return [{"role": "assistant", "content": content, **more}]

    calls = [side("", tool_calls=[{"name": name}]) for name in "fg"]
    assert not row_check.has_equal_sides({"chosen": calls[0], "rejected": calls[1]})
    for chosen, rejected in (("b", "b \n"), (side("b"), side(" b"))):
        pair = {"prompt": "a", "chosen": chosen, "rejected": rejected}
        with pytest.raises(UserError, match=r"a.jsonl:1: chosen and rejected are equal"):
            load(configured(path=jsonl(tmp_path / "a.jsonl", [pair])), "dpo")


@pytest.mark.parametrize("score", [None, True, "1"])
def test_scores_must_be_finite_numbers(tmp_path, score):
    path = jsonl(tmp_path / "a.jsonl", [sample("a", "b", score)])
    with pytest.raises(UserError, match=r"a.jsonl:1: score is"):
        load(configured(kind="samples", path=path), "dpo")


def test_a_stream_is_lazy_endless_and_reproducible(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*rows(50), "not JSON"])
    settings = configured(
        path=path, streaming=True, shuffle_buffer=4, limit=30, filter={"levels": [0, 1]}
    )
    first = list(itertools.islice(load(settings, "sft").rows, 60))  # two passes of 30
    assert {row["prompt"] for row in first} <= {r["prompt"] for r in rows(50) if r["level"] < 2}
    assert first == list(itertools.islice(load(settings, "sft").rows, 60))
    settings.filter.levels = [7]
    settings.path = jsonl(tmp_path / "b.jsonl", rows(3))
    with pytest.raises(UserError, match="no rows"):
        next(iter(load(settings, "sft").rows))


def test_heldout_questions_in_the_training_file_cause_a_warning(tmp_path, capsys):
    train = [
        {"prompt": "What is 1?", "completion": "1"},
        {"messages": [{"role": "user", "content": "What is 2?"}]},
        {"prompt": 3},
        {},
    ]
    heldout = [
        {"prompt": text, "answer": "1"} for text in ("what  is 1?", "What is 2?", "What is 3?")
    ]
    settings = configured(
        path=jsonl(tmp_path / "a.jsonl", train), heldout_path=jsonl(tmp_path / "b.jsonl", heldout)
    )
    assert len(load_heldout(settings)) == 3
    warning = capsys.readouterr().out
    assert warning.startswith("warning: ")
    assert "2 of 3" in warning
    jsonl(tmp_path / "a.jsonl", train[2:])
    load_heldout(settings)
    assert capsys.readouterr().out == ""
