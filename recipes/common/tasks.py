"""Generated problems: reasoning-gym tasks in two sets that do not meet, and their scorers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from functools import cache
from typing import Any, get_type_hints

import reasoning_gym
from omegaconf import DictConfig, OmegaConf
from reasoning_gym.coaching import BaseCurriculum
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import CURRICULA, DATASETS

from recipes.common import cups
from recipes.common.errors import UserError, near

Problem = dict[str, Any]
PLAIN = {int: "a whole number", bool: "true or false"}  # types of fields that reasoning-gym leaves unchecked
DRAWS = 100  # of a wrong answer, before all are looked at
WORKINGS = {cups.NAME: cups.working}


def generate(data: DictConfig, heldout_as_trained: bool = False) -> tuple[list[Problem], list[Problem]]:
    """The training and the held-out problems of `data` (kind reasoning).

    Both follow from `data.seed` alone, so that runs with different `seed` are measured on the same held-out problems. No question
    of one set occurs in the other. A problem is {prompt: [user message], completion: [assistant message], answer, task, level,
    entry}; `entry` is the task's own record as JSON, which its scorer reads. The completion of a held-out problem is its answer, or
    with `heldout_as_trained` in the form of the training's, whose loss can be compared with theirs.

    Raises UserError for an unknown task, level or field, a value of another type, and a task with too few different problems.
    """
    if not data.tasks:
        raise UserError("data.tasks is empty: a reasoning data set needs at least one task, for example data=reasoning.")
    if not data.num_train:
        raise UserError(f"data.num_train={data.num_train}: it must be at least 1, for example data.num_train=10000.")
    total = sum(task.weight for task in data.tasks)
    heldout, train = [], []
    for task in data.tasks:
        share = task.weight / total
        _check_working(task)
        held = _draw(task, "heldout", data.seed, round(data.num_heldout * share), exclude=set(), distinct=True)
        questions = {_question(problem) for problem in held}
        drawn = _draw(task, "train", data.seed, max(1, round(data.num_train * share)), exclude=questions, distinct=False)
        train += _worked(drawn, task.worked, data.seed)
        heldout += _worked(held, task.worked if heldout_as_trained else 0.0, data.seed)
    order = random.Random(data.seed)
    order.shuffle(heldout)
    order.shuffle(train)
    # Two tasks may phrase the same question, so the check spans the sets and not the tasks.
    questions = {_question(problem) for problem in heldout}
    return [problem for problem in train if _question(problem) not in questions], heldout


def known() -> dict[str, dict[str, Any]]:
    """Task -> {highest: its highest level, None of one without a curriculum; fields: what its config takes; working: whether its rows can
    show theirs}."""
    return {
        name: {
            "highest": _highest_level(CURRICULA[name]()) if name in CURRICULA else None,
            "fields": sorted(_fields(config_class)),
            "working": name in WORKINGS,
        }
        for name, (_, config_class) in DATASETS.items()
    }


def score(answer: str, problem_entry: str) -> float:
    """What the task's own scorer gives `answer`, from 0 to 1; `problem_entry` is a problem's `entry`."""
    entry = json.loads(problem_entry)
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))


def wrong_answer(problem: Problem, others: list[Problem], rng: random.Random) -> str:
    """A wrong answer to `problem`: the right one to one of `others`, problems of the same task."""
    for _ in range(DRAWS):  # nearly any will do; scoring all, for each of n problems, would take n * n
        if (answer := rng.choice(others)["answer"]) != problem["answer"] and score(answer, problem["entry"]) < 1.0:
            return answer
    candidates = [other["answer"] for other in others if score(other["answer"], problem["entry"]) < 1.0]
    if not candidates:
        raise UserError(f"every problem of task {problem['task']} has the same answer, so that none can be the rejected one of a pair.")
    return rng.choice(candidates)


@cache
def _scorer(task: str):
    return reasoning_gym.get_score_answer_fn(task)


def _question(problem: Problem) -> str:
    return problem["prompt"][0]["content"]


def _check_working(task: DictConfig) -> None:
    if task.worked and task.name not in WORKINGS:
        raise UserError(f"data.tasks: {task.name} has worked={task.worked:g}, and no working to show; {', '.join(WORKINGS)} has.")


def _worked(problems: list[Problem], share: float, seed: int) -> list[Problem]:
    """The problems, of which about `share`, drawn at random, are answered with their working first, and the others with none, as Qwen3
    marks it: the two ways then part at the same place, and the greedy one is what more rows show."""
    rng = random.Random(f"worked/{seed}")
    for problem in problems if share else ():
        working = WORKINGS[problem["task"]](json.loads(problem["entry"])["metadata"]) if rng.random() < share else ""
        problem["completion"] = [{"role": "assistant", "content": f"<think>{working}</think>{problem['answer']}"}]
    return problems


def _draw(task: DictConfig, split: str, seed: int, count: int, exclude: set[str], distinct: bool) -> list[Problem]:
    problems, seen = [], set(exclude)
    attempts = 20 * count + 1000
    name, level = task.name, task.level  # read once: OmegaConf takes longer than a problem
    dataset = _dataset(task, split, seed, attempts)
    for index in range(attempts):
        if len(problems) == count:
            return problems
        problem = _problem(name, level, dataset[index])
        if index == 0:
            _check_scorer(problem)
        if _question(problem) in seen:
            continue
        if distinct:
            seen.add(_question(problem))
        problems.append(problem)
    raise UserError(
        f"task {task.name} at level {task.level} gave {len(problems)} of {count} {split} problems in {attempts} attempts: it has too few "
        "different questions. Raise its level or widen its config, or lower data.num_heldout."
    )


def _dataset(task: DictConfig, split: str, seed: int, size: int) -> ProceduralDataset:
    if task.name not in DATASETS:
        raise UserError(f"data.tasks names {task.name!r}, which is no task. {near(task.name, DATASETS)}")
    # A data set draws item i from seed + i: neighbouring seeds would repeat each other's problems, hashed ones lie far apart.
    start = int.from_bytes(hashlib.sha256(f"{split}/{task.name}/{seed}".encode()).digest()[:4], "big")
    dataset_class, config_class = DATASETS[task.name]
    config = _curriculum_config(task) if task.name in CURRICULA else config_class()
    given, takes = OmegaConf.to_container(task.config), get_type_hints(config_class)
    for key in given:
        if key not in _fields(config_class):
            raise UserError(f"data.tasks: {task.name} has no field {key!r}. {near(key, _fields(config_class))}")
        usual = getattr(config, key)  # not of the type it says in rearc
        if takes[key] in PLAIN and type(given[key]) not in (takes[key], type(usual)):  # some are refused at the first problem, or never
            example = f"{key}: {str(usual).lower()}"
            raise UserError(f"data.tasks: {task.name} has {key}={given[key]!r}; it takes {PLAIN[takes[key]]}, for example {example}.")
    try:
        return dataset_class(dataclasses.replace(config, **given, seed=start, size=size))
    except (AssertionError, TypeError, ValueError) as error:  # how reasoning-gym refuses a value, or fails on one
        raise UserError(f"data.tasks: {task.name} refuses its configuration {given}: {error}") from error


def _check_scorer(problem: Problem) -> None:
    # Some tasks' scorers need what JSON does not keep, such as integer keys; rewards from those would be zero throughout.
    if score(problem["answer"], problem["entry"]) < 1.0:
        raise UserError(
            f"data.tasks: the scorer of {problem['task']} does not accept the task's own answer from its record; use another task."
        )


def _curriculum_config(task: DictConfig) -> Any:
    curriculum: BaseCurriculum = CURRICULA[task.name]()
    highest = _highest_level(curriculum)
    if not 0 <= task.level <= highest:
        raise UserError(f"data.tasks: level {task.level} of {task.name} is outside 0 to {highest}.")
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(task.level, len(attribute.levels) - 1))
    return curriculum.generate_configuration()


def _highest_level(curriculum: BaseCurriculum) -> int:
    return max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1


def _fields(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}


def _problem(task: str, level: int, entry: dict[str, Any]) -> Problem:
    answer = str(entry["answer"])
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "completion": [{"role": "assistant", "content": answer}],
        "answer": answer,
        "task": task,
        "level": level,
        "entry": json.dumps(entry, sort_keys=True, default=str),
    }
