"""Reject data without a source, wrong settings of tasks, and missing held-out rows."""

from __future__ import annotations

from collections.abc import Iterator

from launch.rules.refusal import Refusal
from launch.schema import Config, trainer_args
from launch.schema.enums import Init
from launch.schema.trainer_args import value_or_none

TOLERANCE = 1e-6  # for the sum of weights, because 1/3 may have seven digits
HELD_OUT_ROWS = {
    "reasoning": "data.num_heldout=500",
    "code": "data.num_heldout=200",
    "jsonl": "data.heldout_path=<file.jsonl> or data.heldout_fraction=0.1",
    "hub": "data.heldout_split=<split> or data.heldout_fraction=0.1",
    "mix": "data.heldout_fraction=0.1",
}


def first_metric(config: Config) -> str:
    """Return the override that selects the best model by the method's first held-out metric."""
    metric = next(iter(config.method.held_out_metrics), "<a metric that the trainer logs>")
    return f"method.selection.metric={metric}"


def source_problems(c: Config) -> Iterator[Refusal]:
    """Reject data without its source, and mixtures with wrong sources or weights."""
    data = c.data
    has_weights = c.model.path or c.model.init == Init.pretrained
    # An evaluation of a model with a tokenizer reads only held-out rows.
    only_heldout = c.method.measures_model and data.heldout_path and has_weights
    mixture = "[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]"
    needed = {
        "reasoning": {"tasks": "[{name: chain_sum, level: 0}]", "num_train": "1000"},
        "code": {"tasks": "[{name: lists, level: 0}]", "num_train": "1000"},
        "jsonl": {} if only_heldout else {"path": "<file.jsonl>"},
        "samples": {"path": "<run of method=sample>/scored.jsonl"},
        "hub": {"hub_id": "<owner/name>"},
        "mix": {"sources": mixture},
    }.get(data.kind, {})
    missing = [key for key in needed if not getattr(data, key)]
    if missing:
        remedy = " ".join(f"data.{key}={needed[key]}" for key in missing)
        message = f"data={data.name} needs {' and '.join(f'data.{key}' for key in missing)}"
        yield Refusal("data_source", message, f"'{remedy}'" if "{" in remedy else remedy)
        return
    problem = remedy = ""
    total = sum(source.weight for source in data.sources)
    for number, source in enumerate(data.sources):
        if (source.path is None) == (source.hub_id is None):
            problem = f"data.sources[{number}] needs either a path or a hub_id"
            remedy = mixture
    if not problem and data.sources and abs(total - 1) > TOLERANCE:
        shares = ", ".join(f"{source.weight / (total or 1):.4g}" for source in data.sources)
        problem = f"data.sources: the weights sum to {total:g}, not to 1"
        remedy = f"weights that sum to 1: {shares}"
    if problem:
        yield Refusal("data_source", problem, remedy)


def task_problems(c: Config) -> Iterator[Refusal]:
    """Reject levels, fields and shares that a task of the lock file does not have."""
    tasks = trainer_args.lock()["tasks"].get(c.data.kind, {})
    for number, task in enumerate(c.data.tasks if tasks else []):
        key, entry, problem = f"data.tasks[{number}]", tasks.get(task.name), ""
        if entry is None:  # limits.py rejects it
            continue
        highest = entry["highest"]  # null for a task without a curriculum
        if highest is not None and not 0 <= task.level <= highest:
            problem = f"level={task.level}: {task.name} has levels 0 to {highest}"
            remedy = "level: 0, or config: {<field>: <value>} for another difficulty"
        # A task without a curriculum may have a level as the label of its config, as in data=cups.
        elif highest is None and task.level and not (task.level > 0 and task.config):
            problem = f"level={task.level}: without config, {task.name} has only one level"
            remedy = "level: 0, or config: {<field>: <value>} that makes it harder"
        elif unknown := [name for name in task.config if name not in entry["fields"]]:
            problem = f"config.{unknown[0]}: {task.name} has no such field"
            remedy = f"fields of {task.name}: {', '.join(entry['fields']) or 'none'}"
        elif task.worked > entry["working"]:
            problem = f"worked={task.worked:g}: {task.name} has no worked solution"
            remedy = "worked: 0 for answers only; or data=cups"
        if problem:
            yield Refusal("task", f"{key}.{problem}", remedy)


def heldout_problems(c: Config) -> Iterator[Refusal]:
    """Reject evaluations and selections of the best model without held-out rows."""
    metric = c.method.selection.metric if c.method.held_out_metrics else None
    remedy = HELD_OUT_ROWS.get(c.data.kind, "data=jsonl data.path=<file> data.heldout_path=<file>")
    evaluates = c.method.measures_model and not value_or_none(c, "lm_eval_tasks")
    if not c.data.has_heldout and (metric or evaluates):
        setting = f"method.selection.metric={metric}" if metric else f"method={c.method.name}"
        yield Refusal("heldout_rows", f"{setting}: data={c.data.name} has no held-out rows", remedy)
