"""Define rules about tasks of generated problems: names, levels, fields and shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launch.core.errors import near
from launch.rules.rule import Rule
from launch.schema import Config, Task, trainer_args

Known = dict[str, Any]


def _known(config: Config) -> dict[str, Known]:
    """Return each task's {highest, fields, working}, as `make lock` wrote them.

    `highest` is the highest level, null for a task without a curriculum.
    """
    tasks: dict[str, Known] = trainer_args.lock()["tasks"].get(config.data.kind, {})
    return tasks


def _first(config: Config, wrong: Callable[[Task, Known | None], str | None]) -> str | None:
    """Return the first fault that `wrong` finds; it gets None for an unknown task."""
    known = _known(config)
    said = (
        f"data.tasks[{n}]{fault}"
        for n, task in enumerate(config.data.tasks)
        if (fault := wrong(task, known.get(task.name)))
    )
    return next(said, None)


def _unknown(config: Config) -> str | None:
    """Return the first unknown task, with a similar name."""
    known = _known(config)
    said = (
        f"data.tasks[{n}].name={task.name}: data={config.data.name} has no such "
        f"task.{near(str(task.name), known)}"
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
    return (
        f"of {task.name}: {', '.join(fields)}"
        if fields
        else f"no config with {task.name}; level makes it harder"
    )


def _worked(task: Task, known: Known | None) -> str | None:
    return (
        None
        if known is None or 0 <= task.worked <= known["working"]
        else f".worked={task.worked:g} ({task.name})"
    )


TASK_RULES = [
    Rule(
        "task_unknown",
        lambda c: _unknown(c) is not None,
        lambda c: str(_unknown(c)),
        lambda c: (
            "lists, strings or numbers"
            if c.data.kind == "code"
            else "chain_sum, or another of reasoning-gym's tasks or shuffled_cups"
        ),
    ),
    Rule(
        "task_level",
        lambda c: _first(c, _level) is not None,
        lambda c: str(_first(c, _level)),
        lambda c: (
            "level: 0"
            if c.data.kind == "code"
            else "level: 0, or a config: {<field>: <value>} of its own"
        ),
    ),
    Rule(
        "task_field",
        lambda c: _first(c, _field) is not None,
        lambda c: str(_first(c, _field)),
        _fields,
    ),
    Rule(
        "task_worked",
        lambda c: _first(c, _worked) is not None,
        lambda c: f"{_first(c, _worked)} is not a share, or the task has no working to show",
        "worked=0 for answers alone; data=cups, and 0.5 for as many with their working",
    ),
]
