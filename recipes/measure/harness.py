"""Evaluate a run's model with the prompts and scoring of lm-evaluation-harness.

No image has the package (lm_eval); install it from containers/cpu/lm-eval.lock.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import datasets

from launch.core.errors import UserError, near_or_all
from recipes.rank.program import say


def load(names: list[str], include: str | None) -> Any:
    """Return the harness's TaskManager, after loading each task's data once to fail early.

    `include` is a directory with the user's task files. Raises UserError if the harness is missing,
    a task is unknown, or a task's data is not available.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"method.args.lm_eval_tasks={names}: lm-evaluation-harness is not installed where the "
            "ranks run. Outside a container: make lm-eval. In your own image: install "
            "containers/cpu/lm-eval.lock. Or use: method.args.lm_eval_tasks=[]."
        )
    from lm_eval.tasks import TaskManager

    datasets.disable_caching()  # tasks map their rows, and offline, the cache is read-only
    manager = TaskManager(include_path=include)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            where = f"lm-evaluation-harness or lm_eval_include={include}"
            raise UserError(
                f"method.args.lm_eval_tasks: no task {name!r} in {where}.{near_or_all(name, known)}"
            )
        try:
            manager.load([name])
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"method.args.lm_eval_tasks: the data of {name} cannot be loaded from this machine "
                f"or the hub: {reason}"
            ) from error
    return manager


def evaluate(manager: Any, generator: Any, args: Any) -> dict[str, dict[str, float]]:
    """Return {task: {metric: value}}, including the harness's standard errors `<metric>_stderr`.

    `generator` has the model and the tokenizer. `args` are method=evaluate's.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    tokenizer = generator.tokenizer
    template = args.chat_template_kwargs
    # lm-eval 0.4 reads chat_template_args only if enable_thinking is set (its issue 3639).
    thinking = {"enable_thinking": template.get("enable_thinking"), "chat_template_args": template}
    kinds = ("random", "numpy_random", "torch_random", "fewshot_random")
    report = simple_evaluate(
        HFLM(generator.model, tokenizer=tokenizer, batch_size=args.batch_size, **thinking),
        tasks=args.lm_eval_tasks,
        task_manager=manager,
        limit=args.lm_eval_limit,
        apply_chat_template=bool(tokenizer.chat_template),
        log_samples=False,
        **{f"{kind}_seed": args.seed for kind in kinds},
    )
    results = {}
    for task, values in report["results"].items():
        # Keys are metric,filter. Remove the filter if it is none.
        results[task] = {
            key.removesuffix(",none"): float(value)
            for key, value in values.items()
            if "," in key and isinstance(value, (int, float))
        }
        say(f"{task}: " + ", ".join(f"{key} {value:.4g}" for key, value in results[task].items()))
    return results
