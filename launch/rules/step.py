"""Rows of check.py's table about how a step is computed: compiled layers, rows, and which layers recompute."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Rows
from launch.trainer_args import argument

OF_METHOD = {Rows.packed: ("sft", "grpo"), Rows.grouped: ("sft", "dpo", "grpo")}  # the others pad


def _no_compiled_layers(config: Config) -> str | None:
    """What keeps fp8 from being compiled; None where layers, or the whole model, will be."""
    if argument(config, "torch_compile") or config.smoke:
        return None
    if config.step.compile is False:
        return "step.compile=false"
    if not config.hardware.compile:
        return f"hardware.compile=false ({config.hardware.name})"
    return "method.args.use_liger_kernel=true" if argument(config, "use_liger_kernel") else None


def _checkpointing(config: Config) -> bool:
    return bool(argument(config, "gradient_checkpointing"))


STEP_RULES = [
    Rule(
        "compiled_layers_and_liger",
        lambda c: bool(c.step.compile) and bool(argument(c, "use_liger_kernel")),
        lambda c: "step.compile=true with method.args.use_liger_kernel=true: each is slower for the other",
        lambda c: "one of them; compiled layers alone are the faster",
    ),
    Rule(
        "compiled_layers_and_model",
        lambda c: bool(c.step.compile) and bool(argument(c, "torch_compile")),
        lambda c: "step.compile=true with method.args.torch_compile=true: layers and the whole model would both be compiled",
        lambda c: "step.compile=true alone, which starts in a ninth of the time",
    ),
    Rule(
        "compiled_layers_without_compiler",
        lambda c: bool(c.step.compile) and not c.hardware.compile,
        lambda c: f"step.compile=true on {c.hardware.name}: Inductor miscompiles or refuses {c.hardware.gfx}",
        lambda c: "step.compile=false",
    ),
    Rule(
        "fp8_eager",
        lambda c: (
            c.precision.compute == "fp8"
            and c.precision.name in c.hardware.precisions  # else the rule of precisions says it all
            and c.method.kind == "trainer"
            and _no_compiled_layers(c) is not None
        ),
        lambda c: f"precision=fp8 with {_no_compiled_layers(c)}: fp8's scales take three times as long as bf16 unless layers are compiled",
        lambda c: "precision=bf16, or compiled layers (step.compile=true)",
    ),
    Rule(
        "packed_without_kernel",
        lambda c: c.step.rows == Rows.packed and c.hardware.packed_attention is None,
        lambda c: f"step.rows=packed on {c.hardware.name}: hardware.packed_attention is null, so attention would cross from row to row",
        lambda c: "step.rows=grouped; or hardware.packed_attention=<kernel> where you know that one works",
    ),
    Rule(
        "rows_packed_twice",
        lambda c: c.step.rows in (Rows.packed, Rows.grouped) and bool(argument(c, "packing") or argument(c, "padding_free")),
        lambda c: (
            f"step.rows={c.step.rows.name if c.step.rows else ''} with method.args."
            f"{'packing' if argument(c, 'packing') else 'padding_free'}=true: rows are joined already"
        ),
        lambda c: "step.rows=padded; or method.args.packing=false, to pack the rows of each step only",
    ),
    Rule(
        "rows_of_method",
        lambda c: c.step.rows in OF_METHOD and c.method.kind == "trainer" and c.method.name not in OF_METHOD[c.step.rows],
        lambda c: f"step.rows={c.step.rows.name if c.step.rows else ''} with method={c.method.name}: its rows are not joined so",
        lambda c: "step.rows=grouped or padded" if c.method.name == "dpo" else "step.rows=padded",
    ),
    Rule(
        "checkpointed_layers_unused",
        lambda c: c.step.checkpointed_layers is not None and c.method.kind == "trainer" and not _checkpointing(c),
        lambda c: f"step.checkpointed_layers={c.step.checkpointed_layers} with gradient_checkpointing=false: no layer recomputes",
        lambda c: "method.args.gradient_checkpointing=true, or no step.checkpointed_layers",
    ),
    Rule(
        "checkpointed_layers_range",
        lambda c: c.step.checkpointed_layers is not None and not 1 <= c.step.checkpointed_layers <= c.model.num_layers,
        lambda c: f"step.checkpointed_layers={c.step.checkpointed_layers}: {c.model.name} has {c.model.num_layers} layers",
        lambda c: f"1 to {c.model.num_layers}; or method.args.gradient_checkpointing=false for none",
    ),
]


def step_warnings(config: Config) -> list[str]:
    """What is given for a step, to a method that takes none."""
    given = [f"step.{name}" for name in ("compile", "rows", "checkpointed_layers") if getattr(config.step, name) is not None]
    if not given or config.method.kind in ("trainer", "tune", "cycles"):
        return []
    return [f"{', '.join(given)}: method={config.method.name} takes no optimizer steps, so they take no effect."]
