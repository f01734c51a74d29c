"""Generate reasoning-gym problems in two disjoint sets, and score answers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

import reasoning_gym
from omegaconf import DictConfig, OmegaConf
from reasoning_gym.coaching import BaseCurriculum
from reasoning_gym.factory import CURRICULA, DATASETS

from launch.core.errors import UserError
from recipes.data import cups
from recipes.data.code_tasks import disjoint_splits

Problem = dict[str, Any]
DRAWS = 100  # random attempts to find a wrong answer before trying all answers
WORKED_SOLUTIONS = {cups.NAME: cups.worked_solution}


def generate(
    data: DictConfig, heldout_in_training_format: bool = False
) -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out problems for `data`, with no question in common.

    Both depend only on `data.seed`, so runs with another `seed` are measured on the same problems.
    A problem is {prompt: [user message], completion: [assistant message], answer, task, level,
    entry}. `entry` is the task's record as JSON, for its scorer. A held-out completion is only the
    answer. For comparable losses, `heldout_in_training_format` formats it as in training.

    Raises UserError as `disjoint_splits` does, and for a field or value that a task rejects.
    """

    def finish(problems: list[Problem], task: DictConfig, split: str) -> None:
        """Add worked solutions before the answers in a random share of the problems.

        The other problems get empty <think> tags, as in Qwen3. Both kinds then diverge at the
        same token, and greedy decoding follows the more frequent kind.
        """
        rng, share = random.Random(f"worked/{data.seed}"), task.worked
        if split == "heldout" and not heldout_in_training_format:
            share = 0.0
        for problem in problems if share else ():
            solution = ""
            if rng.random() < share:
                metadata = json.loads(problem["entry"])["metadata"]
                solution = WORKED_SOLUTIONS[problem["task"]](metadata)
            answer = f"<think>{solution}</think>{problem['answer']}"
            problem["completion"] = [{"role": "assistant", "content": answer}]

    return disjoint_splits(data, functools.partial(_draws, data.seed), finish)


def task_facts() -> dict[str, dict[str, Any]]:
    """Return {task: {highest: level or None, fields: of its config, working: has solutions}}."""
    highest = {
        name: max(len(attribute.levels) for attribute in curriculum().attributes.values()) - 1
        for name, curriculum in CURRICULA.items()
    }
    return {
        name: {
            "highest": highest.get(name),
            "fields": sorted({f.name for f in dataclasses.fields(config_class)} - {"seed", "size"}),
            "working": name in WORKED_SOLUTIONS,
        }
        for name, (_, config_class) in DATASETS.items()
    }


def score(answer: str, problem_entry: str) -> float:
    """Return the task's score of `answer`, from 0 to 1. `problem_entry` is a problem's `entry`."""
    entry = json.loads(problem_entry)
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))


def wrong_answer(problem: Problem, others: list[Problem], rng: random.Random) -> str:
    """Return a wrong answer to `problem` from `others`. Raises UserError if there is none."""
    # Nearly every draw is wrong. Scoring all answers to each of n problems would take n * n calls.
    for _ in range(DRAWS):
        if (answer := rng.choice(others)["answer"]) != problem["answer"] and score(
            answer, problem["entry"]
        ) < 1.0:
            return answer
    candidates = [
        other["answer"] for other in others if score(other["answer"], problem["entry"]) < 1.0
    ]
    if not candidates:
        raise UserError(
            f"data.tasks: all problems of {problem['task']} have the same answer, so preference "
            "pairs lack a wrong one. Use another task."
        )
    return rng.choice(candidates)


_scorer = functools.cache(reasoning_gym.get_score_answer_fn)


def _draws(seed: int, task: DictConfig, split: str, attempts: int) -> Iterator[Problem]:
    name, level = task.name, task.level  # read once, since OmegaConf is slow
    # A data set draws item i from seed + i, so neighboring seeds would share problems. Hashed
    # seeds are far apart.
    start = int.from_bytes(hashlib.sha256(f"{split}/{name}/{seed}".encode()).digest()[:4], "big")
    dataset_class, config_class = DATASETS[name]
    config, overrides = config_class(), OmegaConf.to_container(task.config)
    if name in CURRICULA:
        curriculum: BaseCurriculum = CURRICULA[name]()
        for attribute_name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(attribute_name, min(level, len(attribute.levels) - 1))
        config = curriculum.generate_configuration()
    try:
        dataset = dataset_class(dataclasses.replace(config, **overrides, seed=start, size=attempts))
        dataset[0]  # some values are rejected only here
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"data.tasks: {name} rejects config={overrides}: {error}. Change the config."
        ) from error
    for index in range(attempts):
        entry = dataset[index]
        answer = str(entry["answer"])
        record = json.dumps(entry, sort_keys=True, default=str)
        # Some scorers need data that JSON does not preserve, such as integer keys. They would score
        # every answer 0.
        if index == 0 and score(answer, record) < 1.0:
            raise UserError(
                f"data.tasks: {name} cannot be scored, because its scorer needs data that JSON "
                "does not preserve. Use another task."
            )
        yield {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "completion": [{"role": "assistant", "content": answer}],
            "answer": answer,
            "task": name,
            "level": level,
            "entry": record,
        }
