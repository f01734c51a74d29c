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
from recipes.data.code_tasks import disjoint

Problem = dict[str, Any]
DRAWS = 100  # random attempts to find a wrong answer, before all answers are tried
WORKINGS = {cups.NAME: cups.working}


def generate(
    data: DictConfig, heldout_as_trained: bool = False
) -> tuple[list[Problem], list[Problem]]:
    """Generate the training and held-out problems of `data`, which share no question.

    Both follow from `data.seed` alone, so runs with another `seed` are measured on the same
    problems. A problem is {prompt: [user message], completion: [assistant message], answer, task,
    level, entry}; `entry` is the task's own record as JSON, which its scorer reads. A held-out
    completion is the answer; with `heldout_as_trained` it has the same form as in training, so that
    losses can be compared.

    Raises UserError as `disjoint` does, and for a field or value that a task rejects.
    """

    def finish(problems: list[Problem], task: DictConfig, split: str) -> None:
        """Let a share of the problems, drawn at random, show their working before the answer.

        The others have empty <think> tags, as Qwen3 has without working. So both kinds diverge at
        the same token, and greedy decoding follows the more frequent one.
        """
        rng, share = random.Random(f"worked/{data.seed}"), task.worked
        if split == "heldout" and not heldout_as_trained:
            share = 0.0
        for problem in problems if share else ():
            working = ""
            if rng.random() < share:
                working = WORKINGS[problem["task"]](json.loads(problem["entry"])["metadata"])
            answer = f"<think>{working}</think>{problem['answer']}"
            problem["completion"] = [{"role": "assistant", "content": answer}]

    return disjoint(data, functools.partial(_draws, data.seed), finish)


def known() -> dict[str, dict[str, Any]]:
    """Return each task's `highest` level or None, its config's `fields`, and `working`."""
    highest = {
        name: max(len(attribute.levels) for attribute in curriculum().attributes.values()) - 1
        for name, curriculum in CURRICULA.items()
    }
    return {
        name: {
            "highest": highest.get(name),
            "fields": sorted({f.name for f in dataclasses.fields(config_class)} - {"seed", "size"}),
            "working": name in WORKINGS,
        }
        for name, (_, config_class) in DATASETS.items()
    }


def score(answer: str, problem_entry: str) -> float:
    """Score `answer` from 0 to 1 by its task's scorer; `problem_entry` is a problem's `entry`."""
    entry = json.loads(problem_entry)
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))


def wrong_answer(problem: Problem, others: list[Problem], rng: random.Random) -> str:
    """Return a wrong answer: the right answer to another problem (`others`) of the same task."""
    # Nearly every draw is wrong; scoring all answers for each of n problems would take n * n.
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
            f"data.tasks: all problems of {problem['task']} have the same answer, so none can be "
            "rejected. Use another task."
        )
    return rng.choice(candidates)


_scorer = functools.cache(reasoning_gym.get_score_answer_fn)


def _draws(seed: int, task: DictConfig, split: str, attempts: int) -> Iterator[Problem]:
    name, level = task.name, task.level  # read once: OmegaConf takes longer than a problem
    # A data set draws item i from seed + i, so neighbouring seeds would share problems. Hashed
    # seeds are far apart.
    start = int.from_bytes(hashlib.sha256(f"{split}/{name}/{seed}".encode()).digest()[:4], "big")
    dataset_class, config_class = DATASETS[name]
    config, own = config_class(), OmegaConf.to_container(task.config)
    if name in CURRICULA:
        curriculum: BaseCurriculum = CURRICULA[name]()
        for attribute_name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(attribute_name, min(level, len(attribute.levels) - 1))
        config = curriculum.generate_configuration()
    try:
        dataset = dataset_class(dataclasses.replace(config, **own, seed=start, size=attempts))
        dataset[0]  # some values are rejected only here
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.tasks: {name} rejects its config {own}: {error}") from error
    for index in range(attempts):
        entry = dataset[index]
        answer = str(entry["answer"])
        record = json.dumps(entry, sort_keys=True, default=str)
        # Some scorers need data that JSON does not preserve, such as integer keys. Their rewards
        # would always be zero.
        if index == 0 and score(answer, record) < 1.0:
            raise UserError(
                f"data.tasks: the scorer of {name} rejects the task's own answer from its record. "
                "Use another task."
            )
        yield {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "completion": [{"role": "assistant", "content": answer}],
            "answer": answer,
            "task": name,
            "level": level,
            "entry": record,
        }
