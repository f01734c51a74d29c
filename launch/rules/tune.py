"""Define rules about tunings."""

from __future__ import annotations

from typing import Any

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.trainer_args import argument, recipe_name

# settings of the tuned benchmark that each trial sets itself
SETTINGS: dict[str, Any] = {"tune/rccl": [], "tune/vllm": [{}]}


def makes_rows(config: Config) -> bool:
    return config.method.tunes and argument(config, "rows") == "full"


TUNE_RULES = [
    Rule(
        "tune_full_rows",
        lambda c: (
            makes_rows(c)
            and (recipe_name(c) == "grpo" or c.method.args.get("max_length", 0) is None)
        ),
        "method.args.rows=full makes rows for sft and dpo, of max_length tokens",
        "method.args.rows=data; or recipe=sft or dpo and method.args.max_length=<tokens>",
    ),
    Rule(
        "tune_for_rocm",
        lambda c: (
            c.method.name in ("tune/tunableop", "tune/miopen")
            and c.hardware.vendor == Vendor.nvidia
        ),
        lambda c: f"method={c.method.name} tunes ROCm's libraries: {c.hardware.name} has none",
        "an AMD GPU; method=tune/inductor and tune/batch are for this one too",
    ),
]
