"""Define rules about a step's computation: compiled layers, rows, and recomputed layers."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Rows
from launch.schema.trainer_args import argument


def _no_compiled_layers(config: Config) -> str | None:
    """Return what keeps fp8 from being compiled; None if layers or the model will be."""
    if argument(config, "torch_compile") or config.smoke:
        return None
    if config.step.compile is False:
        return "step.compile=false"
    if not config.hardware.compile:
        return f"hardware.compile=false ({config.hardware.name})"
    return "method.args.use_liger_kernel=true" if argument(config, "use_liger_kernel") else None


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


STEP_RULES = [
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
    Rule(
        "fp8_eager",
        lambda c: (
            c.precision.compute == "fp8"
            and c.precision.name in c.hardware.precisions  # else precision's rule says it all
            and c.method.trains
            and _no_compiled_layers(c) is not None
        ),
        lambda c: f"precision=fp8 with {_no_compiled_layers(c)} is three times as slow as bf16",
        "precision=bf16, or compiled layers (step.compile=true)",
    ),
    Rule(
        "rows_of_method",
        lambda c: c.step.rows not in (None, Rows.padded, *c.method.row_layouts) and c.method.trains,
        "step.rows: the method does not have this layout",
        lambda c: f"step.rows={' or '.join([r.name for r in c.method.row_layouts] + ['padded'])}",
    ),
]


def step_warnings(config: Config) -> list[str]:
    """Return warnings about keys of `step` under a method that has no steps."""
    given = [
        f"step.{name}"
        for name in ("compile", "rows", "checkpointed_layers")
        if getattr(config.step, name) is not None
    ]
    if not given or (config.method.trains or config.method.tunes or config.method.has_cycles):
        return []
    return [
        f"{', '.join(given)}: method={config.method.name} takes no optimizer steps, so they "
        "take no effect."
    ]
