"""Rows of check.py's table about tunings."""

from __future__ import annotations

from typing import Any

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.trainer_args import argument, recipe_name

SETTINGS: dict[str, Any] = {"tune/rccl": [], "tune/vllm": [{}]}  # of the benchmark that is tuned: each trial has one of its own


def _makes_rows(config: Config) -> bool:
    return config.method.kind == "tune" and argument(config, "rows") == "full"


TUNE_RULES = [
    Rule(
        "tune_rows",
        lambda c: _makes_rows(c) and c.data.name != "reasoning",
        lambda c: (
            f"data={c.data.name} with method={c.method.name}: it measures rows that it makes, full to max_length, and would ignore them"
        ),
        lambda c: "no data=; or method.args.rows=data, whose steps are of the lengths that the data has",
    ),
    Rule(
        "tune_full_rows",
        lambda c: _makes_rows(c) and (recipe_name(c) == "grpo" or c.method.args.get("max_length", 0) is None),
        lambda c: (
            f"method.args.rows=full with recipe={recipe_name(c)}"
            + (": it makes rows for sft and dpo" if recipe_name(c) == "grpo" else " and max_length=null: nothing says how long a row is")
        ),
        lambda c: "method.args.rows=data" + ("" if recipe_name(c) == "grpo" else "; or method.args.max_length=<a number of tokens>"),
    ),
    Rule(
        "tune_settings",
        lambda c: c.method.name in SETTINGS and argument(c, "settings") != SETTINGS[c.method.name],
        lambda c: f"method.args.settings={argument(c, 'settings')} with method={c.method.name}: its trials are the settings",
        lambda c: "method.args.space, whose values are tried, or user_env, which every trial has",
    ),
    Rule(
        "tune_for_rocm",
        lambda c: c.method.name in ("tune/tunableop", "tune/miopen") and c.hardware.vendor == Vendor.nvidia,
        lambda c: f"method={c.method.name} on {c.hardware.name}: it chooses between kernels of ROCm's libraries",
        lambda c: "an AMD GPU; method=tune/inductor and tune/batch are for this one too",
    ),
    Rule(
        "tune_inductor",
        lambda c: c.method.name == "tune/inductor" and not c.hardware.compile,
        lambda c: f"method=tune/inductor on {c.hardware.name}: its hardware file turns compilation off for {c.hardware.gfx}",
        lambda c: "method=tune/tunableop or tune/batch",
    ),
]
