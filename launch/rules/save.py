"""Rows of check.py's table about the models that a training saves, the schedule of its learning rate, and the losses that it adds up."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.trainer_args import HELD_OUT_METRICS, argument

# Schedule -> names in method.args.lr_scheduler_kwargs of which transformers wants one, and says so once every rank is up.
WANTED = {
    "cosine_with_min_lr": ("min_lr_rate", "min_lr"),
    "cosine_warmup_with_min_lr": ("min_lr_rate", "min_lr"),
    "warmup_stable_decay": ("num_decay_steps",),
}
FOLLOWS_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


def _lacks(config: Config) -> tuple[str, ...]:
    given = argument(config, "lr_scheduler_kwargs") or {}
    wanted = WANTED.get(str(argument(config, "lr_scheduler_type")), ())
    return wanted if isinstance(given, dict) and not any(given.get(name) is not None for name in wanted) else ()


def _losses(config: Config) -> tuple[list[str], list[float] | None] | None:
    """DPO's losses and their weights; None for a method that takes one loss."""
    given = argument(config, "loss_type")
    return (given, argument(config, "loss_weights")) if isinstance(given, list) else None


def _do_not_match(config: Config) -> bool:
    losses = _losses(config)
    return losses is not None and (not losses[0] or (losses[1] is not None and len(losses[1]) != len(losses[0])))


def _losses_said(config: Config) -> str:
    losses, weights = _losses(config) or ([], None)
    if not losses:
        return "method.args.loss_type=[]: no loss, and nothing would be trained"
    return f"method.args.loss_weights={weights} with {len(losses)} loss(es) in loss_type: each has one weight"


def _losses_to_give(config: Config) -> str:
    losses, _ = _losses(config) or ([], None)
    if not losses:
        return "method.args.loss_type=[sigmoid]"
    return f"method.args.loss_weights=[{','.join(['1.0'] * len(losses))}] for [{','.join(losses)}]"


def _schedule(config: Config) -> str:
    return f"method.args.lr_scheduler_type={argument(config, 'lr_scheduler_type')}"


def _metric(config: Config) -> str:
    return f"method.selection.metric={next(iter(HELD_OUT_METRICS.get(config.method.name, ('eval_loss',))))}"


SAVE_RULES = [
    Rule(
        "save_model",
        lambda c: not c.save_model and (bool(c.phases) or c.method.kind != "trainer"),
        lambda c: (
            "save_model=false with " + ("phases, which hand a model on" if c.phases else f"method={c.method.name}, which trains none")
        ),
        lambda c: "leave it out",
    ),
    # With a metric selection_saves refuses it: models are measured where they are saved, and not the other way round.
    Rule(
        "save_best",
        lambda c: argument(c, "save_strategy") == "best" and c.method.selection.metric is None,
        lambda c: "method.args.save_strategy=best without method.selection.metric: nothing says which model is the best",
        lambda c: f"{_metric(c)} method.args.save_strategy=steps, which ends with the best model",
    ),
    Rule(
        "schedule_evaluates",
        lambda c: argument(c, "lr_scheduler_type") in FOLLOWS_EVALUATIONS and c.method.selection.metric is None,
        lambda c: f"{_schedule(c)} without method.selection.metric: it follows what evaluations find, and there would be none",
        lambda c: f"{_metric(c)}, or method.args.lr_scheduler_type=cosine",
    ),
    Rule(
        "schedule_arguments",
        lambda c: bool(_lacks(c)),
        lambda c: f"{_schedule(c)} without {' or '.join(_lacks(c))} in method.args.lr_scheduler_kwargs: transformers has no default for it",
        lambda c: f"'method.args.lr_scheduler_kwargs={{{_lacks(c)[0]}: {0.1 if 'min_lr' in _lacks(c) else 100}}}'",
    ),
    Rule("losses", _do_not_match, _losses_said, _losses_to_give),
]
