"""Define rules about the models that a training saves, and about its learning rate schedule."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.trainer_args import argument

# Schedule -> names in method.args.lr_scheduler_kwargs of which transformers needs one, but reports
# it only once every rank is up.
WANTED = {
    "cosine_with_min_lr": ("min_lr_rate", "min_lr"),
    "cosine_warmup_with_min_lr": ("min_lr_rate", "min_lr"),
    "warmup_stable_decay": ("num_decay_steps",),
}


def _lacks(config: Config) -> tuple[str, ...]:
    given = argument(config, "lr_scheduler_kwargs") or {}
    wanted = WANTED.get(str(argument(config, "lr_scheduler_type")), ())
    return (
        wanted
        if isinstance(given, dict) and not any(given.get(name) is not None for name in wanted)
        else ()
    )


def _schedule(config: Config) -> str:
    return f"method.args.lr_scheduler_type={argument(config, 'lr_scheduler_type')}"


def _metric(config: Config) -> str:
    return f"method.selection.metric={next(iter(config.method.held_out_metrics or ('eval_loss',)))}"


SAVE_RULES = [
    # With a metric, selection_saves rejects it, because saving decides when models are measured,
    # and not vice versa.
    Rule(
        "save_best",
        lambda c: argument(c, "save_strategy") == "best" and c.method.selection.metric is None,
        "method.args.save_strategy=best needs method.selection.metric",
        lambda c: f"{_metric(c)} method.args.save_strategy=steps, which ends with the best model",
    ),
    Rule(
        "schedule_arguments",
        lambda c: bool(_lacks(c)),
        lambda c: (
            f"{_schedule(c)} needs {' or '.join(_lacks(c))} in method.args.lr_scheduler_kwargs"
        ),
        lambda c: (
            f"'method.args.lr_scheduler_kwargs={{{_lacks(c)[0]}: "
            f"{0.1 if 'min_lr' in _lacks(c) else 100}}}'"
        ),
    ),
]
