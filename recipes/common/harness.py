"""Tasks of lm-evaluation-harness on the model of a run: its tasks, prompts and scoring, our weights.

The package (lm_eval) is in no image: containers/cpu/lm-eval.lock is for who wants it, beside what a run needs anyway.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets

from recipes.common.errors import UserError, near
from recipes.common.program import say

if TYPE_CHECKING:  # at run time it is imported where it is used, since it may not be there
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(names: list[str], include: str | None) -> Any:
    """The harness's TaskManager, after every task of `names` has been loaded with its data once: what is missing shows before any work.

    `include`: a directory with task files of the user's own. Raises UserError where the harness is not installed, for a task that it
    does not know, and for data that can be had neither here nor from the hub.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"method.args.lm_eval_tasks={names}: lm-evaluation-harness is not installed where the ranks run. Use: make lm-eval outside "
            "a container, containers/cpu/lm-eval.lock in an image of your own, or no lm_eval_tasks."
        )
    from lm_eval.tasks import TaskManager

    if include is not None and not Path(include).is_dir():
        raise UserError(f"method.args.lm_eval_include={include}: there is no such directory. It holds the YAML files of your tasks.")
    manager = TaskManager(include_path=include)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            raise UserError(f"method.args.lm_eval_tasks has {name!r}, which lm-evaluation-harness does not know. {near(name, known)}")
        try:
            manager.load([name])
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"method.args.lm_eval_tasks: the data of {name} cannot be had here or from the hub: {reason}") from error
    return manager


def evaluate(
    manager: Any,
    names: list[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    limit: int | None,
    seed: int,
) -> dict[str, dict[str, float]]:
    """{task: {metric: value}}, with `<metric>_stderr` as the harness reckons it; of each task the first `limit` documents, None for all."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed)
    found = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=names,
        task_manager=manager,
        limit=limit,
        apply_chat_template=bool(tokenizer.chat_template),
        log_samples=False,
        **seeds,
    )
    results = {task: _figures(values) for task, values in found["results"].items()}
    for task, values in results.items():
        say(f"{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    return results


def _figures(values: dict[str, Any]) -> dict[str, float]:
    """The harness writes `acc,none` and `acc_stderr,none`: metric and filter; the filter is named where there is one."""
    return {key.removesuffix(",none"): float(value) for key, value in values.items() if "," in key and isinstance(value, (int, float))}
