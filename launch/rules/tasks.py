"""Rows of check.py's table about the tasks of generated problems: their names, levels, fields and shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from launch import trainer_args
from launch.errors import near
from launch.rules.rule import Rule
from launch.schema import Config, Task

Known = dict[str, Any]


def _known(config: Config) -> dict[str, Known]:
    """Task -> {highest: level, or null where it has no curriculum; fields: of its config; working: bool}, as `make lock` wrote them."""
    tasks: dict[str, Known] = trainer_args.lock()["tasks"].get(config.data.kind, {})
    return tasks


def _first(config: Config, wrong: Callable[[Task, Known | None], str | None]) -> str | None:
    """What `wrong` says of the first task that it finds fault with; it is given None for a name that is no task's."""
    known = _known(config)
    said = (f"data.tasks[{n}]{fault}" for n, task in enumerate(config.data.tasks) if (fault := wrong(task, known.get(task.name))))
    return next(said, None)


def _unknown(config: Config) -> str | None:
    """The first task that is none, and what it might mean."""
    known = _known(config)
    said = (
        f"data.tasks[{n}].name={task.name}: data={config.data.name} has no such task.{near(str(task.name), known)}"
        for n, task in enumerate(config.data.tasks)
        if known and task.name not in known
    )
    return next(said, None)


def _level(task: Task, known: Known | None) -> str | None:
    if known is None:
        return None
    said, highest = f".level={task.level} ({task.name}): ", known["highest"]
    if highest is not None:
        return None if 0 <= task.level <= highest else f"{said}it has levels 0 to {highest}"
    # cups.yaml: what the task's config makes harder, a level names.
    named = not task.level or (task.level > 0 and task.config)
    return None if named else f"{said}it has no curriculum, and without config all levels are one"


def _field(task: Task, known: Known | None) -> str | None:
    fields = known["fields"] if known else task.config
    strange = next((str(key) for key in task.config if key not in fields), None)
    return strange and f".config.{strange}: {task.name} has no such field.{near(strange, fields)}"


def _fields(config: Config) -> str:
    known = _known(config)
    task = next(t for t in config.data.tasks if t.name in known and _field(t, known[t.name]))
    fields = known[task.name]["fields"]
    return f"of {task.name}: {', '.join(fields)}" if fields else f"no config with {task.name}; level makes it harder"


def _weight(task: Task, known: Known | None) -> str | None:
    return None if 0 < task.weight < math.inf else f".weight={task.weight:g} ({task.name})"


def _worked(task: Task, known: Known | None) -> str | None:
    return None if known is None or 0 <= task.worked <= known["working"] else f".worked={task.worked:g} ({task.name})"


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
        lambda c: _first(c, _level) is not None,
        lambda c: str(_first(c, _level)),
        lambda c: "level: 0" if c.data.kind == "code" else "level: 0, or a config: {<field>: <value>} of its own",
    ),
    Rule(
        "task_field",
        lambda c: _first(c, _field) is not None,
        lambda c: str(_first(c, _field)),
        _fields,
    ),
    Rule(
        "task_weight",
        lambda c: _first(c, _weight) is not None,
        lambda c: f"{_first(c, _weight)}: each task's share of the problems is its weight over the sum of all",
        lambda c: "a weight above 0 for each of data.tasks; leave out a task that is to have no problems",
    ),
    Rule(
        "task_worked",
        lambda c: _first(c, _worked) is not None,
        lambda c: (
            f"{_first(c, _worked)}: it is the share of rows that show their working, from 0 to 1, and only "
            f"{', '.join(name for name, task in trainer_args.lock()['tasks']['reasoning'].items() if task['working'])} has one to show"
        ),
        lambda c: "worked=0 for answers alone; data=cups, and 0.5 for as many with their working",
    ),
]
