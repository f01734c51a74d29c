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


STEP_RULES = [
    Rule(
        "compiled_layers_alone",
        lambda c: (
            bool(c.step.compile)
            and bool(argument(c, "use_liger_kernel") or argument(c, "torch_compile"))
        ),
        "step.compile=true with method.args.use_liger_kernel or torch_compile=true is slower than "
        "step.compile alone",
        "one of them; step.compile=true starts in a ninth of the time of torch_compile",
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
        "packed_without_kernel",
        lambda c: c.step.rows == Rows.packed and c.hardware.packed_attention is None,
        lambda c: f"step.rows=packed: {c.hardware.name} has no kernel that keeps rows apart",
        "step.rows=grouped; or hardware.packed_attention=<kernel> where you know that one works",
    ),
    Rule(
        "rows_packed_twice",
        lambda c: (
            c.step.rows in (Rows.packed, Rows.grouped)
            and bool(argument(c, "packing") or argument(c, "padding_free"))
        ),
        "step.rows with method.args.packing or padding_free=true: rows are joined already",
        "step.rows=padded; or method.args.packing=false, to pack the rows of each step only",
    ),
    Rule(
        "rows_of_method",
        lambda c: c.step.rows not in (None, Rows.padded, *c.method.row_layouts) and c.method.trains,
        "step.rows: the method does not have this layout",
        lambda c: f"step.rows={' or '.join([r.name for r in c.method.row_layouts] + ['padded'])}",
    ),
    Rule(
        "checkpointed_layers_range",
        lambda c: (
            c.step.checkpointed_layers is not None
            and c.step.checkpointed_layers > c.model.num_layers
        ),
        lambda c: f"step.checkpointed_layers: {c.model.name} has {c.model.num_layers} layers",
        lambda c: (
            f"1 to {c.model.num_layers}; or method.args.gradient_checkpointing=false for none"
        ),
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
