"""Test each named reward, and functions that cannot be imported."""

import json

import pytest

from launch.core.errors import UserError
from recipes.rewards import reward_functions as functions

ENTRY = json.dumps({"answer": "46", "metadata": {"source_dataset": "chain_sum"}})


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(("text", "answer", "expected"), [
    ("46", "46", 1.0),
    (r"$\frac{1}{2}$", "0.5", 1.0),
    ("<think>47</think><answer>46</answer>", "46", 1.0),
    ("46", 46, 1.0),
    ("0.00005", 0.00005, 1.0),
    ("10000000000000000", 1e16, 1.0),
    ("47", "46", 0.0),
    ("", "46", 0.0),
    ("None", None, None),  # a row without an answer
])  # fmt: skip
def test_accuracy(text, answer, expected):
    assert functions.accuracy(["p"], [said(text)], answer=[answer]) == [expected]


WRONG = [
    ("12:30", "12:45"),
    ("blue 5", "red 5"),
    (r"\boxed{3 apples}", "3 pears"),
    ("10 m", "10 km"),
    ("2x", "2y"),
    ("level 3 is wrong", "3"),
    ("3-2", "2-1"),
    ("2024-01-15", "2024-02-14"),
    ("1 1/2", "1 3/4"),
    ("1, 2, 3", "3, 1, 2"),
    ("HELLO", "hello"),
    ("5", "1, 2, 3, 4, 5"),
    ("5", "$1, 2, 5$"),
    ("5", "The answer is 4 or 5"),
    ("5", "1 and 2 and 5"),
    ("5", "-5 or 5"),
    ("5", r"\boxed{4 \text{ or } 5}"),
    ("5", "3 - 5"),
    ("5", "10/2"),
    ("5", "1e5"),
    ("5e-05", "0.00004"),
    ("0.0000005", "0.0000004"),
    ("5", "F5"),
    ("5", ""),
    ("45", "12:45"),
    ("144", "12*12"),
    ("391", r"\boxed{17 \times 23}"),
    ("46", "23 plus 23"),
    ("1024", "2^{10}"),
    ("12", r"\sqrt{144}"),
    ("-3", "3"),
    ("3", r"\boxed{\sqrt{3}}"),
    ("2", r"\boxed{2\pi}"),
    ("5", r"\boxed{x \geq 5}"),
    ("5", r"$(-\infty,5)$"),
    ("5", r"$\pm 5$"),
    ("5", "x = -5 or x = 5"),
    ("10", r"\boxed{x^{10}}"),
]
RIGHT = [
    ("5e-05", "The answer is 0.00005."),
    ("0.00005", "5e-5"),
    ("1234", "1,234"),
    ("5%", r"$5\%$"),
    ("1/2", r"\frac{1}{2}"),
    (r"\sqrt{3}", r"$\sqrt3$"),
    ("[0, 1)", "$[0,1)$"),
    ("$1, 2$", "$2, 1$"),
    ("n = 7", "7"),
    ("3 apples", r"so \boxed{3\text{ apples}}"),
    ("3 apples", "The answer is 3  apples."),
    ("so $2+2=4$. #### 42", "42"),
    (r"so \boxed{42} it is", "42"),
    ("42", "I add 2 and 40: 42"),
    ("-3", "x = −3"),
    ("5", "5 apples"),
    ("1/2", r"Final answer: $\frac12$. I hope it is correct."),
    ("0.5", r"\dfrac{1}{2}"),
    ("42", "The answer is 42. I checked it 3 times."),
    ("42", "Answer:\n42"),
    ("14", "There are 7 red and 7 blue ones, so 14."),
    ("14", "3 + 4 = 7, and 7 * 2 = 14 apples"),
    ("42", "42 (since 40 + 2 = 42)"),
    ("90", r"90^\circ"),
    ("5", r"5\text{ cm}"),
    ("18", "9*2=<<9*2=18>>18"),
    ("72", "48+24 = <<48+24=72>>72\n#### 72"),
    ("2500", r"so \boxed{2{,}500} of them"),
    ("-1/2", r"-\frac{1}{2}"),
    ("-3", "x = - 3"),
    ("11", "5.5 * 2 ≈ 11"),
    ("11", "22 / 2\n11"),
    ("5", "The answer is 5 km in 10 minutes"),
    ("5", "The answer is 2 + 3 = 5."),
    ("5", "x + 2 = 7, so x = 5"),
]


@pytest.mark.parametrize(
    ("pair", "expected"), [*((pair, 0.0) for pair in WRONG), *((pair, 1.0) for pair in RIGHT)]
)
def test_answers_are_compared_as_mathematics_only_if_the_right_answer_is(pair, expected):
    assert functions.accuracy(["p"], [said(pair[1])], answer=[pair[0]]) == [expected]


def test_format_needs_the_exact_layout():
    texts = {
        "<think>a</think>\n<answer>b</answer>": 1.0,
        "<answer>b</answer>": 0.0,
        "<think>a</think><answer>b</answer> c": 0.0,
        "<think>a</think><answer>b</answer> c </answer>": 0.0,
        "<think>a<think>b</think><answer>c</answer>": 0.0,
    }
    assert functions.format(["p"] * 5, [said(text) for text in texts]) == [*texts.values()]


def test_reasoning_gym_uses_the_tasks_scorer():
    texts = [said(text) for text in ("<think>no</think> 46", "<answer>046</answer>", "45", "")]
    scores = functions.reasoning_gym(["p"] * 4, texts, entry=[ENTRY] * 4)
    assert scores == [1.0, 1.0, 0.0, 0.0]


def test_regex_must_match_the_entire_answer():
    texts = ["<answer>12</answer>", "12 or so", ""]
    assert functions.regex(["p"] * 3, texts, pattern=[r"\d+"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("path", "message"), [
    ("nowhere.reward", "No module named 'nowhere'"),
    ("recipes.rewards.reward_functions.lenght", "has no attribute 'lenght'"),
])  # fmt: skip
def test_functions_that_cannot_be_imported(path, message):
    with pytest.raises(UserError, match=message):
        functions.import_reward(path)
