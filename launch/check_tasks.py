"""Rows of check.py's table about the tasks of generated problems: their names, levels, fields and shares."""

from __future__ import annotations

import math
from typing import Any

from launch import trainer_args
from launch.errors import near
from launch.rule import Rule
from launch.schema import Config, Task


def _known(config: Config) -> dict[str, dict[str, Any]]:
    """Task -> {highest: level, or null where it has no curriculum; fields: of its config; working: bool}, as `make lock` wrote them."""
    tasks: dict[str, dict[str, Any]] = trainer_args.lock()["tasks"].get(config.data.kind, {})
    return tasks


def _unknown(config: Config) -> str | None:
    """The first task that is none, and what it might mean."""
    known = _known(config)
    said = (
        f"data.tasks[{n}].name={task.name}: data={config.data.name} has no such task.{near(str(task.name), known)}"
        for n, task in enumerate(config.data.tasks)
        if known and task.name not in known
    )
    return next(said, None)


def _level(task: Task, highest: int | None) -> str | None:
    if highest is not None:
        return None if 0 <= task.level <= highest else f"it has levels 0 to {highest}"
    # cups.yaml: what the task's config makes harder, a level names.
    return None if not task.level or (task.level > 0 and task.config) else "it has no curriculum, and without config all levels are one"


def _no_level(config: Config) -> str | None:
    """The first level that a task does not have."""
    known = _known(config)
    said = (
        f"data.tasks[{n}].level={task.level} ({task.name}): {why}"
        for n, task in enumerate(config.data.tasks)
        if task.name in known and (why := _level(task, known[task.name]["highest"]))
    )
    return next(said, None)


def _no_field(config: Config) -> str | None:
    """The first entry of a config that its task does not read."""
    known = _known(config)
    said = (
        f"data.tasks[{n}].config.{key}: {task.name} has no such field.{near(str(key), known[task.name]['fields'])}"
        for n, task in enumerate(config.data.tasks)
        if task.name in known
        for key in task.config
        if key not in known[task.name]["fields"]
    )
    return next(said, None)


def _fields(config: Config) -> str:
    known = _known(config)
    task = next(t for t in config.data.tasks if t.name in known and set(t.config) - set(known[t.name]["fields"]))
    fields = known[task.name]["fields"]
    return f"of {task.name}: {', '.join(fields)}" if fields else f"no config with {task.name}; level makes it harder"


def _weightless(config: Config) -> str | None:
    """The first task that would get no rows, or fewer than none."""
    given = (
        f"data.tasks[{n}].weight={task.weight:g} ({task.name})"
        for n, task in enumerate(config.data.tasks)
        if not 0 < task.weight < math.inf
    )
    return next(given, None)


def _unworkable(config: Config) -> str | None:
    """The first task of whose rows no such share can show their working."""
    known = _known(config)
    given = (
        f"data.tasks[{n}].worked={task.worked:g} ({task.name})"
        for n, task in enumerate(config.data.tasks)
        if task.name in known and not 0 <= task.worked <= known[task.name]["working"]
    )
    return next(given, None)


TASK_RULES = [
    Rule(
        "task_unknown",
        lambda c: _unknown(c) is not None,
        lambda c: str(_unknown(c)),
        lambda c: (
            "lists, strings or numbers" if c.data.kind == "code" else "chain_sum, or another of reasoning-gym's tasks or shuffled_cups"
        ),
    ),
    Rule(
        "task_level",
        lambda c: _no_level(c) is not None,
        lambda c: str(_no_level(c)),
        lambda c: "level: 0" if c.data.kind == "code" else "level: 0, or a config: {<field>: <value>} of its own",
    ),
    Rule(
        "task_field",
        lambda c: _no_field(c) is not None,
        lambda c: str(_no_field(c)),
        _fields,
    ),
    Rule(
        "task_weight",
        lambda c: _weightless(c) is not None,
        lambda c: f"{_weightless(c)}: each task's share of the problems is its weight over the sum of all",
        lambda c: "a weight above 0 for each of data.tasks; leave out a task that is to have no problems",
    ),
    Rule(
        "task_worked",
        lambda c: _unworkable(c) is not None,
        lambda c: (
            f"{_unworkable(c)}: it is the share of rows that show their working, from 0 to 1, and only "
            f"{', '.join(name for name, task in trainer_args.lock()['tasks']['reasoning'].items() if task['working'])} has one to show"
        ),
        lambda c: "worked=0 for answers alone; data=cups, and 0.5 for as many with their working",
    ),
]
