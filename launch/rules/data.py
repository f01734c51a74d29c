"""Reject data without a source, wrong tasks of generated problems, and missing held-out rows."""

from __future__ import annotations

from collections.abc import Iterator

from launch.core.errors import near
from launch.rules.refusal import Refusal
from launch.schema import Config, trainer_args
from launch.schema.enums import Init
from launch.schema.trainer_args import argument

TOLERANCE = 1e-6  # for the sum of weights, since 1/3 may be written with seven digits
HELD_OUT_ROWS = {
    "reasoning": "data.num_heldout=500",
    "code": "data.num_heldout=200",
    "jsonl": "data.heldout_path=<file.jsonl> or data.heldout_fraction=0.1",
    "hub": "data.heldout_split=<split> or data.heldout_fraction=0.1",
    "mix": "data.heldout_fraction=0.1",
}


def first_metric(config: Config) -> str:
    metric = next(iter(config.method.held_out_metrics), "<a figure that the trainer logs>")
    return f"method.selection.metric={metric}"


def has_heldout(config: Config) -> bool:
    """Return whether load_heldout in recipes/data/data_load.py would find rows."""
    data = config.data
    own = {
        "reasoning": data.num_heldout,
        "code": data.num_heldout,
        "jsonl": data.heldout_path,
        "hub": data.heldout_split,
    }
    return bool(own.get(data.kind) or data.heldout_fraction)


def source_faults(c: Config) -> Iterator[Refusal]:
    """Yield what is missing in this kind of data, or wrong in a mixture."""
    data = c.data
    has_weights = c.model.path or c.model.init == Init.pretrained
    # an evaluation with a tokenizer reads held-out rows only
    only_heldout = c.method.measures_model and data.heldout_path and has_weights
    mixture = "[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]"
    needed = {
        "reasoning": {"tasks": "[{name: chain_sum, level: 0}]", "num_train": "1000"},
        "code": {"tasks": "[{name: lists, level: 0}]", "num_train": "1000"},
        "jsonl": {} if only_heldout else {"path": "<file.jsonl>"},
        "samples": {"path": "<run of method=sample>/scored.jsonl"},
        "hub": {"hub_id": "<owner/name>", "revision": "<its commit>"},
        "mix": {"sources": mixture},
    }.get(data.kind, {})
    missing = [key for key in needed if not getattr(data, key)]
    if missing:
        remedy = " ".join(f"data.{key}={needed[key]}" for key in missing)
        message = f"data={data.name} without {' and '.join(f'data.{key}' for key in missing)}"
        yield Refusal("data_source", message, f"'{remedy}'" if "{" in remedy else remedy)
        return
    for number, source in enumerate(data.sources):
        if (source.path is None) == (source.hub_id is None):
            names = "neither path nor hub_id" if source.path is None else "path and hub_id"
            message = f"data.sources[{number}] has {names}"
            yield Refusal("data_source", message, "a path or a hub_id in each")
        elif source.hub_id and not source.revision:
            message = f"data.sources[{number}] has a hub_id without a revision"
            yield Refusal("data_source", message, "revision: <its commit> in this source")
    total = sum(source.weight for source in data.sources)
    if data.sources and abs(total - 1) > TOLERANCE:
        shares = ", ".join(f"{source.weight / (total or 1):.4g}" for source in data.sources)
        message = f"data.sources: the weights sum to {total:g}, but they are shares"
        yield Refusal("data_source", message, f"weights that sum to 1: {shares}")
    least, most = data.filter.min_tokens, data.filter.max_tokens
    if least and most and most < least:  # a streamed data set would be searched for ever
        message = f"data.filter.max_tokens={most} with data.filter.min_tokens={least}: no row fits"
        remedy = f"data.filter.max_tokens={least}, or data.filter.min_tokens={most}"
        yield Refusal("filter_lengths", message, remedy)


def task_faults(c: Config) -> Iterator[Refusal]:
    """Yield wrong names, levels, fields and shares of tasks, by the list that `make lock` wrote."""
    tasks = trainer_args.lock()["tasks"].get(c.data.kind, {})
    any_config = "" if c.data.kind == "code" else ", or a config: {<field>: <value>} of its own"
    for number, task in enumerate(c.data.tasks if tasks else []):
        key, known = f"data.tasks[{number}]", tasks.get(task.name)
        if known is None:
            hint = near(str(task.name), tasks)
            example = "lists" if c.data.kind == "code" else "chain_sum"
            message = f"{key}.name={task.name}: data={c.data.name} has no such task.{hint}"
            yield Refusal("task", message, f"name: {example}, or another of the {len(tasks)} tasks")
            continue
        highest, fields = known["highest"], known["fields"]  # null for a task without a curriculum
        fault = f"{key}.level={task.level} ({task.name}): "
        if highest is not None and not 0 <= task.level <= highest:
            yield Refusal("task", f"{fault}it has levels 0 to {highest}", f"level: 0{any_config}")
        # In data=cups, a key of config has the name of a level.
        if highest is None and task.level and not (task.level > 0 and task.config):
            fault += "it has no curriculum, and without config all levels are one"
            yield Refusal("task", fault, f"level: 0{any_config}")
        for name in task.config:
            if name not in fields:
                fault = f"{key}.config.{name}: {task.name} has no such field.{near(name, fields)}"
                yield Refusal("task", fault, f"of {task.name}: {', '.join(fields) or 'no config'}")
        if task.worked > known["working"]:
            fault = f"{key}.worked={task.worked:g} ({task.name}): the task has no working to show"
            yield Refusal("task", fault, "worked: 0 for answers alone; or data=cups")


def heldout_faults(c: Config) -> Iterator[Refusal]:
    """Yield missing held-out rows, and metrics that they do not give."""
    method, metric, metrics = c.method, c.method.selection.metric, c.method.held_out_metrics
    remedy = HELD_OUT_ROWS.get(c.data.kind, "data=jsonl data.path=<file> data.heldout_path=<file>")
    if metric and metrics and metric not in metrics:
        message = f"method.selection.metric={metric} with method={method.name}: no such figure of "
        message += f"held-out rows.{near(metric, metrics)}"
        remedies = " or ".join(f"method.selection.metric={name}" for name in metrics)
        yield Refusal("selection_metric", message, remedies)
    if has_heldout(c):
        return
    if metric and metrics:
        message = f"method.selection.metric={metric}: data={c.data.name} has no held-out rows"
        yield Refusal("selection_heldout", message, remedy)
    if method.measures_model and not argument(c, "lm_eval_tasks"):
        message = f"method=evaluate with data={c.data.name}: no held-out problems"
        yield Refusal("evaluation_data", message, remedy)
