"""Return a plan's warnings about settings that work but have a cost."""

from __future__ import annotations

import math
from collections.abc import Iterator

from launch.config import thinking
from launch.config.conditions import all_met, table
from launch.core.json_files import yaml_file
from launch.estimate.batch_counts import batch
from launch.estimate.memory import engine_fits
from launch.estimate.run_length import epoch_steps
from launch.machine import placement
from launch.machine.gpu import GIB
from launch.rules.model import is_count_of_shape
from launch.rules.optimizers import optimizer_warnings
from launch.rules.setting_rules import FACTS, board
from launch.schema import Config, shapes
from launch.schema.enums import Init, Vendor
from launch.schema.trainer_args import METHODS, known, value_or_none

ALWAYS = {"method.name": "given"}  # a condition that is always met
# weights, gradients, and the moments of AdamW and of its reference, in fp32
NUMERICS_BYTES = 28
ADAPTER_FACTOR = 10  # learning rate of an adapter, in rates of full training (conf/adapter)
MAX_TIMES = 10  # the usual learning rate of an adapter; our choice
MAX_PASSES, USUAL_PASSES = 50, 3  # over the rows of a file; our choice
# Public rows for a pretrained model, by what the method reads.
PUBLIC_DATA = {"sft": "ultrachat", "dpo": "ultrafeedback", "grpo": "gsm8k"}
# Limits of data.filter in tokens, which only training phases read.
LENGTHS = ("min_tokens", "max_tokens", "max_prompt_tokens")


def rule_warnings(c: Config) -> list[str]:
    rate = float(value_or_none(c, "learning_rate") or 0.0)
    values = {
        "rate": rate,
        "board": board(c),
        "ranks": placement.trainers_of_a_node(c),
        "public": PUBLIC_DATA.get(str(c.method.rows)),
    }
    lines = [
        row["text"].format(config=c, **values)
        for row in table(__file__, "warnings")
        if all_met(c, row["when"], FACTS)
        and any(all_met(c, dict([item]), FACTS) for item in row.get("any", ALWAYS).items())
    ]
    keys = [f"step.{name}" for name, value in vars(c.step).items() if value is not None]
    if keys and not (c.method.trains or c.method.tunes or c.method.has_cycles):
        reason = f"method={c.method.name} has no optimizer steps, so these keys take no effect"
        lines.append(f"{', '.join(keys)}: {reason}.")
    more = (
        _adapter_warnings,
        optimizer_warnings,
        _shape_warnings,
        _evaluation_warnings,
        _engine_warnings,
        _fp32_warnings,
        _repeated_rows,
        _cut_off_thoughts,
        _other_columns,
    )
    return [*lines, *(line for warn in more for line in warn(c))]


def adapter_rate(c: Config) -> str | None:
    """Return the override with an adapter's learning rate if only full training's is set."""
    rate = value_or_none(c, "learning_rate")
    is_chosen = "method.args.learning_rate" in c.speed_keeps  # by the user or another file
    if c.adapter.rank is None or not c.method.trains or not rate or is_chosen:
        return None
    return f"method.args.learning_rate={ADAPTER_FACTOR * float(rate):g}"


def _other_columns(c: Config) -> Iterator[str]:
    """Warn of fields that the file of a public data set does not name, as it may lack some."""
    file = METHODS.parent / f"data/{c.data.name}.yaml"  # which the user may have elsewhere
    preset = yaml_file(file) if c.data.hub_id and file.is_file() else {}
    names = sorted({*filter(None, preset.get("columns", {}).values())})
    if not names or preset["hub_id"] != c.data.hub_id:
        return
    if unknown := [f for f, name in c.data.columns.items() if name and name not in names]:
        yield (
            f"data.columns.{unknown[0]}={c.data.columns[unknown[0]]}: conf/data/{file.name} names "
            f"only {', '.join(names)}. If the rows have no such field, leave out "
            f"data.columns.{unknown[0]}."
        )


def _adapter_warnings(c: Config) -> Iterator[str]:
    if override := adapter_rate(c):
        yield (
            f"method.args.learning_rate={value_or_none(c, 'learning_rate'):g} is for training all "
            "weights. An adapter needs about ten times as much (docs/adapters.md). Use: "
            f"{override}."
        )
    # A model with random weights is small, and learns with larger rates.
    if c.adapter.rank is None or not c.method.trains or c.model.init == Init.random:
        return
    rate = float(value_or_none(c, "learning_rate") or 0)
    file = METHODS / f"{c.method.name}.yaml"  # which the user may have elsewhere
    usual = yaml_file(file).get("args", {}).get("learning_rate") if file.is_file() else None
    full = float(usual or 0)
    times = round(rate / (ADAPTER_FACTOR * full), 3) if full else 0
    if times >= MAX_TIMES:
        yield (
            f"method.args.learning_rate={rate:g} is {times:g} times the usual rate of an adapter "
            f"with method={c.method.name}, so training may diverge. Use: "
            f"method.args.learning_rate={ADAPTER_FACTOR * full:g}."
        )


def _cut_off_thoughts(c: Config) -> Iterator[str]:
    """Warn if a model that thinks is cut off before it answers."""
    if limit := thinking.cut_off(c):
        (name, tokens), key = limit, thinking.KEY
        yield (
            f"{key}=true: most answers are cut off after {tokens} tokens, while the model still "
            f"thinks, and score 0. Use: method.args.{name}=8192, or {key}=false."
        )


def _fp32_warnings(c: Config) -> Iterator[str]:
    """Warn if method=bench/numerics needs more than a GPU, because its memory is not planned."""
    needed_gb, gpu_gb = NUMERICS_BYTES * c.model.num_parameters / 1e9, c.hardware.memory_gb * GIB
    is_on_gpu = c.hardware.vendor != Vendor.none and not c.smoke
    if c.method.name == "bench/numerics" and is_on_gpu and needed_gb > gpu_gb:
        yield (
            f"method=bench/numerics: {c.model.name} needs {needed_gb:,.0f} GB of {gpu_gb:.0f} GB "
            "for fp32 weights, gradients and moments. Use: a smaller model, or fewer layers as in "
            "experiment=hardware_report."
        )


def _shape_warnings(c: Config) -> Iterator[str]:
    """Warn if a plan would count other parameters than the shape of a random model has."""
    model = c.model
    if not c.method.uses_model or c.method.measures_machine or c.smoke:
        return
    if model.init != Init.random or not shapes.is_known(model) or is_count_of_shape(model):
        return
    count = shapes.parameters(model)
    yield (
        f"model.num_parameters={model.num_parameters}: this shape has {count} parameters, so "
        f"memory and speed are wrong. Use: model.num_parameters={count}."
    )


def _repeated_rows(c: Config) -> Iterator[str]:
    """Warn if max_steps repeats the rows of a local file many times."""
    if not c.method.trains or c.data.kind != "jsonl":
        return
    size, max_steps = batch(c), int(value_or_none(c, "max_steps") or 0)
    steps = epoch_steps(c, size)
    if steps and max_steps > MAX_PASSES * steps:
        yield (
            f"method.args.max_steps={max_steps}: these steps repeat the rows of data.path "
            f"{max_steps / steps:,.0f} times. Use: "
            f"method.args.max_steps={math.ceil(USUAL_PASSES * steps)} for {USUAL_PASSES} times."
        )


def _engine_warnings(c: Config) -> Iterator[str]:
    """Warn if vLLM's engine does not start with method.args.base on one GPU."""
    if "base" not in known(c) or not c.method.starts_vllm or c.hardware.vendor == Vendor.none:
        return
    base = c.method.args.get("base") or {}
    lengths = c.method.args.get("lengths") or []
    shorter: dict[str, float] = {"max_model_len": max([2048, *map(sum, lengths)])}
    larger: dict[str, float] = {"gpu_memory_utilization": 0.95}
    changes: list[dict[str, float]] = [{}, shorter, larger, {**shorter, **larger}]
    fitting = next((change for change in changes if engine_fits(c, {**base, **change})), None)
    if fitting == {}:
        return
    remedy = " ".join(f"++method.args.base.{key}={value}" for key, value in (fitting or {}).items())
    yield (
        f"method.args.base={base}: {c.model.name} and one sequence of the longest length do not "
        f"fit a GPU of {c.hardware.name}, so rows on one GPU fail. Use: "
        f"{remedy or 'settings with a larger tensor_parallel_size, or with quantization'}."
    )


def _evaluation_warnings(c: Config) -> Iterator[str]:
    """Warn about idle ranks, and about filters that an evaluation ignores.

    Such filters are not rejected, because a pipeline may set them for its training phases.
    """
    if not c.method.measures_model:
        return
    ranks, unread = placement.num_trainers(c), [n for n in LENGTHS if getattr(c.data.filter, n)]
    if unread:
        yield (
            f"data.filter.{', '.join(unread)}: limits in tokens differ by model, so they do not "
            "remove held-out problems."
        )
    problems = c.data.num_heldout and min(c.data.num_heldout, c.data.limit or c.data.num_heldout)
    size = int(value_or_none(c, "batch_size"))
    batches = math.ceil(problems / size)
    if 0 < batches < ranks:
        yield (
            f"method.args.batch_size={size}: {problems} held-out problems are {batches} batches. "
            f"{ranks - batches} of {ranks} ranks stay idle. Use: "
            f"method.args.batch_size={math.ceil(problems / ranks)}."
        )
