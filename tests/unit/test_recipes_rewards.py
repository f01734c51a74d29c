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
        ("46", 46, 1.0),
        ("47", "46", 0.0),
        ("", "46", 0.0),
    ],
)
def test_accuracy(text, answer, expected):
    assert rewards.accuracy(["p"], [said(text)], answer=[answer]) == [expected]


def test_format():
    texts = ["<think>a</think>\n<answer>b</answer>", "<answer>b</answer>", "<think>a</think><answer>b</answer> c"]
    texts += ["<think>a</think><answer>b</answer> c </answer>", "<think>a<think>b</think><answer>c</answer>"]
    assert rewards.format(["p"] * 5, [said(t) for t in texts]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_length_prefers_short():
    assert rewards.length(["p"] * 3, ["", "x" * 200, "x" * 600]) == [1.0, 0.5, 0.25]


def test_reasoning_gym_is_the_tasks_own_scorer():
    texts = ["46", "<think>no</think> 46", "<answer>046</answer>", "45", ""]
    assert rewards.reasoning_gym(["p"] * 5, [said(t) for t in texts], entry=[ENTRY] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_regex_matches_the_whole_answer():
    texts = ["<answer>12</answer>", "12 or so", ""]
    assert rewards.regex(["p"] * 3, texts, pattern=[r"\d+"] * 3) == [1.0, 0.0, 0.0]


def test_a_dotted_path_is_found():
    assert rewards.imported("recipes.common.rewards.length") is rewards.length


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.reward", "No module named 'nowhere'"),
        ("recipes.common.rewards.lenght", "has no function 'lenght'. Did you mean length"),
    ],
)
def test_a_dotted_path_that_leads_nowhere(path, message):
    with pytest.raises(UserError, match=message):
        rewards.imported(path)
