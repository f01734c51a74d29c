"""Each named reward, and what a reward's name may not be."""

import json

import pytest

from recipes.common import rewards
from recipes.common.errors import UserError

ENTRY = json.dumps({"answer": "46", "metadata": {"source_dataset": "chain_sum"}})


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("46", "46", 1.0),
        (r"$\frac{1}{2}$", "0.5", 1.0),
        ("<think>47</think><answer>46</answer>", "46", 1.0),
        ("47", "46", 0.0),
        ("", "46", 0.0),
    ],
)
def test_accuracy(text, answer, expected):
    assert rewards.accuracy(["p"], [said(text)], answer=[answer]) == [expected]


def test_format():
    texts = ["<think>a</think>\n<answer>b</answer>", "<answer>b</answer>", "<think>a</think><answer>b</answer> c"]
    assert rewards.format(["p"] * 3, [said(t) for t in texts]) == [1.0, 0.0, 0.0]


def test_length_prefers_short():
    assert rewards.length(["p"] * 3, ["", "x" * 200, "x" * 600]) == [1.0, 0.5, 0.25]


def test_reasoning_gym_is_the_tasks_own_scorer():
    texts = ["46", "<think>no</think> 46", "<answer>046</answer>", "45", ""]
    assert rewards.reasoning_gym(["p"] * 5, [said(t) for t in texts], entry=[ENTRY] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_names_and_dotted_paths_are_found():
    functions, weights = rewards.build_rewards({"format": 1, "recipes.common.rewards.length": 0.5}, ["prompt"])
    assert (functions, weights) == ([rewards.format, rewards.length], [1.0, 0.5])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs at least one of accuracy, format, length, reasoning_gym"),
        ({"acuracy": 1.0}, "'acuracy', which is no reward. Did you mean accuracy"),
        ({"nowhere.reward": 1.0}, "No module named 'nowhere'"),
        ({"recipes.common.rewards.lenght": 1.0}, "has no function 'lenght'. Did you mean length"),
        ({"reasoning_gym": 1.0}, "reads column 'entry', and the rows have prompt"),
        ({"accuracy": 1.0}, "reads column 'answer'"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        rewards.build_rewards(given, ["prompt"])
