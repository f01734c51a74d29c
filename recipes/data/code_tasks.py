"""Generate programming problems: write a function of one argument from a list of steps.

Solutions consist of expressions from the tables below, so they are safe to evaluate. Their results
are the expected values of the tests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError

Problem = dict[str, Any]
NUM_TESTS = 4
HIGHEST_LEVEL = 9
PROMPT = (
    "Write a Python function f(x) that takes {takes} and returns what these steps make of it:\n"
    "{steps}\nAnswer with a ```python block."
)


@dataclass(frozen=True)
class Kind:
    """Define a task by its type of argument and its possible steps.

    A step is (words, Python expression in x). {k} stands for a random integer from 2 to 9.
    """

    takes: str
    steps: tuple[tuple[str, str], ...]
    draw: Callable[[random.Random], Any]  # returns a random argument
    edge: Any  # the argument of the first test, an edge case


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
    """Return training and held-out problems for `data` (kind code), with no question in common.

    Both depend only on `data.seed`. A problem is {prompt: [user message], completion: [assistant
    message], answer, task, level, tests}. `answer` is the solution, and `tests` is JSON for the
    reward code_tests. Raises UserError as `disjoint_splits` does.
    """

    def draws(task: DictConfig, split: str, attempts: int) -> Iterator[Problem]:
        text = f"{split}/{task.name}/{task.level}/{data.seed}"
        rng = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
        return (_problem(task, rng) for _ in range(attempts))

    return disjoint_splits(data, draws)


def disjoint_splits(
    data: DictConfig,
    draws: Callable[[DictConfig, str, int], Iterator[Problem]],
    finish: Callable[[list[Problem], DictConfig, str], None] = lambda *_: None,
) -> tuple[list[Problem], list[Problem]]:
    """Return shuffled training and held-out problems with no question in common.

    `data.tasks` weights the tasks; launch/rules/data.py has validated them. `draws` yields random
    problems for (task, split, attempts), and `finish` modifies the chosen ones in place. Raises
    UserError if a task has too few distinct questions.
    """
    sets: dict[str, list[Problem]] = {"heldout": [], "train": []}
    for task in data.tasks:
        share = task.weight / sum(task.weight for task in data.tasks)
        heldout_questions: set[str] = set()
        for split, minimum, total in (
            ("heldout", 0, data.num_heldout),
            ("train", 1, data.num_train),
        ):
            count, problems = max(minimum, round(total * share)), []
            attempts = 20 * count + 1000
            drawn = draws(task, split, attempts)
            while len(problems) < count:
                problem = next(drawn, None)
                if problem is None:
                    raise UserError(
                        f"data.tasks: {task.name} at level {task.level} has too few distinct "
                        f"questions: {attempts} attempts found {len(problems)} of {count} {split} "
                        "problems. Raise its level, widen its config, or lower data.num_heldout."
                    )
                if question(problem) not in heldout_questions:
                    problems.append(problem)
                    if split == "heldout":
                        heldout_questions.add(question(problem))
            finish(problems, task, split)
            sets[split] += problems
    order = random.Random(data.seed)
    order.shuffle(sets["heldout"])
    order.shuffle(sets["train"])
    questions = set(map(question, sets["heldout"]))  # of all tasks, since tasks may share questions
    return [p for p in sets["train"] if question(p) not in questions], sets["heldout"]


def question(problem: Problem) -> str:
    return problem["prompt"][0]["content"]


def task_facts() -> dict[str, dict[str, Any]]:
    """Return the facts of tasks.task_facts for the tasks of this module."""
    return {name: {"highest": HIGHEST_LEVEL, "fields": [], "working": False} for name in KINDS}


def _problem(task: DictConfig, rng: random.Random) -> Problem:
    kind = KINDS[task.name]
    steps = [
        (words.format(k=k), code.format(k=k))
        for words, code in rng.choices(kind.steps, k=task.level + 1)
        for k in [rng.randint(2, 9)]
    ]
    solution = "def f(x):\n" + "".join(f"    x = {code}\n" for _, code in steps) + "    return x\n"
    arguments = [kind.edge, *(kind.draw(rng) for _ in range(NUM_TESTS - 1))]
    tests = [
        {
            "call": f"f({argument!r})",
            # `eval` gets only expressions from the tables above.
            "expected": functools.reduce(lambda x, step: eval(step[1], {"x": x}), steps, argument),
        }
        for argument in arguments
    ]
    numbered = "\n".join(f"{i}. {words}" for i, (words, _) in enumerate(steps, start=1))
    return {
        "prompt": [{"role": "user", "content": PROMPT.format(takes=kind.takes, steps=numbered)}],
        "completion": [{"role": "assistant", "content": f"```python\n{solution}```"}],
        "answer": solution,
        "task": task.name,
        "level": task.level,
        "tests": json.dumps(tests),
    }
