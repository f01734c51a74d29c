"""Generated programming problems: a function of one argument, described by its steps, with tests and a solution.

The steps are chosen from the tables below, so every solution is ours, and what the tests expect is what it returns.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from recipes.common.errors import UserError, near

Problem = dict[str, Any]
NUM_TESTS = 4
HIGHEST_LEVEL = 9
PROMPT = "Write a Python function f(x) that takes {takes} and returns what these steps make of it:\n{steps}\nAnswer with a ```python block."


@dataclass(frozen=True)
class Kind:
    """What the problems of a task have in common. A step is (words, expression of x); {k} in both is drawn from 2 to 9."""

    takes: str
    steps: tuple[tuple[str, str], ...]
    draw: Callable[[random.Random], Any]  # an argument
    edge: Any  # the argument of the first test: where careless code fails


KINDS = {
    "lists": Kind(
        "a list of integers",
        (
            ("add {k} to each element", "[v + {k} for v in x]"),
            ("multiply each element by {k}", "[v * {k} for v in x]"),
            ("keep the elements that are greater than {k}", "[v for v in x if v > {k}]"),
            ("keep the elements that {k} divides", "[v for v in x if v % {k} == 0]"),
            ("keep the first {k} elements", "x[:{k}]"),
            ("drop the first {k} elements", "x[{k}:]"),
            ("append {k}", "x + [{k}]"),
            ("reverse the order", "x[::-1]"),
            ("sort in ascending order", "sorted(x)"),
            ("square each element", "[v * v for v in x]"),
        ),
        lambda rng: [rng.randint(-20, 20) for _ in range(rng.randint(3, 12))],
        [],
    ),
    "strings": Kind(
        "a string",
        (
            ("keep the first {k} characters", "x[:{k}]"),
            ("drop the first {k} characters", "x[{k}:]"),
            ("keep every {k}th character, beginning with the first", "x[::{k}]"),
            ("repeat it {k} times", "x * {k}"),
            ("append the digit {k}", "x + '{k}'"),
            ("reverse it", "x[::-1]"),
            ("convert it to upper case", "x.upper()"),
            ("swap upper and lower case", "x.swapcase()"),
            ("remove every letter a, in either case", "x.replace('a', '').replace('A', '')"),
            ("sort its characters by code point", "''.join(sorted(x))"),
        ),
        lambda rng: "".join(rng.choice("abcdeABCDE xyz") for _ in range(rng.randint(3, 16))),
        "",
    ),
    "numbers": Kind(
        "an integer",
        (
            ("add {k}", "x + {k}"),
            ("subtract {k}", "x - {k}"),
            ("multiply by {k}", "x * {k}"),
            ("divide by {k}, rounding down", "x // {k}"),
            ("take the remainder of division by {k}, which is never negative", "x % {k}"),
            ("take the larger of it and {k}", "max(x, {k})"),
            ("take the absolute value", "abs(x)"),
            ("square it", "x * x"),
            ("change its sign", "-x"),
        ),
        lambda rng: rng.randint(-100, 100),
        0,
    ),
}


def generate(data: DictConfig) -> tuple[list[Problem], list[Problem]]:
    """The training and the held-out problems of `data` (kind code); both follow from `data.seed`, and no question is in both.

    A problem is {prompt: [user message], completion: [assistant message], answer, task, level, tests}; `answer` is the solution, `tests`
    the JSON that reward code_tests reads. Raises UserError for an unknown task, level or field, and for too few different problems.
    """
    if not data.tasks or not data.num_train:
        raise UserError(f"data=code with {len(data.tasks)} tasks and num_train={data.num_train}: at least one of each is needed.")
    total = sum(task.weight for task in data.tasks)
    heldout, train = [], []
    for task in data.tasks:
        _check(task)
        share = task.weight / total
        held = _draw(task, "heldout", data.seed, round(data.num_heldout * share), set())
        questions = {p["prompt"][0]["content"] for p in held}
        train += _draw(task, "train", data.seed, max(1, round(data.num_train * share)), questions)
        heldout += held
    order = random.Random(data.seed)
    order.shuffle(heldout)
    order.shuffle(train)
    questions = {p["prompt"][0]["content"] for p in heldout}  # a task may be listed twice
    return [p for p in train if p["prompt"][0]["content"] not in questions], heldout


def known() -> dict[str, dict[str, Any]]:
    """As tasks.known."""
    return {name: {"highest": HIGHEST_LEVEL, "fields": [], "working": False} for name in KINDS}


def _check(task: DictConfig) -> None:
    if task.name not in KINDS:
        raise UserError(f"data.tasks names {task.name!r}, which data=code does not have. {near(task.name, KINDS)}")
    if not 0 <= task.level <= HIGHEST_LEVEL:
        raise UserError(f"data.tasks: level {task.level} of {task.name} is outside 0 to {HIGHEST_LEVEL}.")
    if task.config:
        raise UserError(f"data.tasks: {task.name} of data=code takes no config, and has {', '.join(task.config)}.")


def _draw(task: DictConfig, split: str, seed: int, count: int, exclude: set[str]) -> list[Problem]:
    """`count` problems whose questions are not in `exclude`; held-out ones all differ."""
    start = hashlib.sha256(f"{split}/{task.name}/{task.level}/{seed}".encode()).digest()[:8]
    rng, seen, problems = random.Random(int.from_bytes(start, "big")), set(exclude), []
    attempts = 20 * count + 1000
    for _ in range(attempts):
        if len(problems) == count:
            return problems
        problem = _problem(task, rng)
        question = problem["prompt"][0]["content"]
        if question in seen:
            continue
        if split == "heldout":
            seen.add(question)
        problems.append(problem)
    raise UserError(
        f"task {task.name} at level {task.level} gave {len(problems)} of {count} {split} problems in {attempts} attempts: it has too few "
        "different questions. Raise its level, or lower data.num_heldout."
    )


def _problem(task: DictConfig, rng: random.Random) -> Problem:
    kind = KINDS[task.name]
    steps = [
        (words.format(k=k), code.format(k=k)) for words, code in rng.choices(kind.steps, k=task.level + 1) for k in [rng.randint(2, 9)]
    ]
    solution = "def f(x):\n" + "".join(f"    x = {code}\n" for _, code in steps) + "    return x\n"
    arguments = [kind.edge, *(kind.draw(rng) for _ in range(NUM_TESTS - 1))]
    tests = [{"call": f"f({argument!r})", "expected": _value(steps, argument)} for argument in arguments]
    listed = "\n".join(f"{i}. {words}" for i, (words, _) in enumerate(steps, start=1))
    return {
        "prompt": [{"role": "user", "content": PROMPT.format(takes=kind.takes, steps=listed)}],
        "completion": [{"role": "assistant", "content": f"```python\n{solution}```"}],
        "answer": solution,
        "task": task.name,
        "level": task.level,
        "tests": json.dumps(tests),
    }


def _value(steps: list[tuple[str, str]], argument: Any) -> Any:
    """Of the expressions in the tables above: nothing that a model wrote is ever evaluated here."""
    for _, code in steps:
        argument = eval(code, {"x": argument})
    return argument
