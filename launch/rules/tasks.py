"""Define the rule about tasks of generated problems: names, levels, fields and shares."""

from __future__ import annotations

from typing import Any

from launch.core.errors import near
from launch.rules.rule import rule_of
from launch.schema import Config, Task, trainer_args


def _fault(config: Config) -> tuple[str, str] | None:
    tasks = trainer_args.lock()["tasks"].get(config.data.kind, {})
    for number, task in enumerate(config.data.tasks):
        key, known = f"data.tasks[{number}]", tasks.get(task.name)
        if known is not None:
            if fault := _fault_of(task, key, known, config.data.kind):
                return fault
        elif tasks:
            return (
                f"{key}.name={task.name}: data={config.data.name} has no such "
                f"task.{near(str(task.name), tasks)}",
                "lists, strings or numbers"
                if config.data.kind == "code"
                else "chain_sum, or another of reasoning-gym's tasks or shuffled_cups",
            )
    return None


def _fault_of(task: Task, key: str, known: dict[str, Any], kind: str) -> tuple[str, str] | None:
    """Return what is wrong with a task. `known` is its entry as `make lock` wrote it."""
    highest, fields = known["highest"], known["fields"]  # null for a task without a curriculum
    remedy = "level: 0" + ("" if kind == "code" else ", or a config: {<field>: <value>} of its own")
    if highest is not None and not 0 <= task.level <= highest:
        return f"{key}.level={task.level} ({task.name}): it has levels 0 to {highest}", remedy
    # cups.yaml: what the task's config makes harder, a level names.
    if highest is None and task.level and not (task.level > 0 and task.config):
        return (
            f"{key}.level={task.level} ({task.name}): it has no curriculum, and without config "
            "all levels are one",
            remedy,
        )
    unknown = next((str(name) for name in task.config if name not in fields), None)
    if unknown is not None:
        return (
            f"{key}.config.{unknown}: {task.name} has no such field.{near(unknown, fields)}",
            f"of {task.name}: {', '.join(fields)}"
            if fields
            else f"no config with {task.name}; level makes it harder",
        )
    if task.worked > known["working"]:
        return (
            f"{key}.worked={task.worked:g} ({task.name}): the task has no working to show",
            "worked=0 for answers alone; data=cups, and 0.5 for as many with their working",
        )
    return None


TASK_RULES = [rule_of("task", _fault)]
