"""Define rules about benchmarks and tunings.

A benchmark itself rejects gates, sizes and numbers of GPUs before it measures.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

from launch.rules.rule import Rule, rule_of
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.trainer_args import argument, own, recipe_name

# Arguments that are lists of lists of integers: the meaning of an inner list, and an example.
LISTS = {
    "shapes": ("m, n, k", "8192,8192,8192"),
    "heads": ("query heads, key heads, width", "32,8,128"),
    "lengths": ("tokens in, tokens out", "1024,128"),
}
# settings of the tuned benchmark that each trial sets itself
SETTINGS: dict[str, Any] = {"tune/rccl": [], "tune/vllm": [{}]}
COLLECTIVES = "bench/collectives"
TAKEN_EMPTY = ("dtypes", "settings")  # bench/collectives then measures its defaults


def _list_fault(config: Config) -> tuple[str, str] | None:
    """Return the first argument that is an empty list, or whose items a benchmark cannot read."""
    name_of_method = config.method.name
    for name in own(config) if config.method.measures_machine else ():
        items, key = argument(config, name), f"method.args.{name}"
        if items == [] and not (name_of_method == COLLECTIVES and name in TAKEN_EMPTY):
            or_null = "; or null for all" if own(config)[name]["default"] is None else ""
            example = f"one item or more, as in conf/method/{name_of_method}.yaml{or_null}"
            return f"{key}=[]: nothing would be measured", example
        parts, example = LISTS.get(name, ("", ""))
        if parts and any(_is_bad(item, parts.count(",") + 1) for item in items or []):
            return (
                f"{key}={items}: each item must be a list [{parts}] of numbers from 1",
                f"{key}=[[{example}]]",
            )
    for setting in argument(config, "settings") if name_of_method == COLLECTIVES else ():
        if not _is_environment(setting):
            return (
                f"method.args.settings: {setting} must map environment variables to texts, "
                "numbers or null",
                "'method.args.settings=[{NCCL_MIN_NCHANNELS: 112}]'",
            )
    return None


def _is_bad(item: Any, length: int) -> bool:
    return (
        not isinstance(item, list)
        or len(item) != length
        or any(type(part) is not int or part < 1 for part in item)
    )


def _is_environment(setting: Any) -> bool:
    """Return whether texts, numbers or nulls are mapped; a `true` would become the text True."""
    return (
        isinstance(setting, dict)
        and bool(setting)
        and all(isinstance(name, str) and name for name in setting)
        and all(type(value) in (str, int, float, NoneType) for value in setting.values())
    )


def _dtypes_without_peak(config: Config) -> list[str]:
    dtypes = argument(config, "dtypes") or []
    if config.smoke or config.hardware.vendor == Vendor.none:
        return []
    return [dtype for dtype in dtypes if dtype not in config.hardware.peak_tflops]


def makes_rows(config: Config) -> bool:
    return config.method.tunes and argument(config, "rows") == "full"


BENCH_RULES = [
    rule_of("bench_lists", _list_fault),
    Rule(
        "bench_without_gpu",
        lambda c: c.method.measures_machine and c.hardware.vendor == Vendor.none and not c.smoke,
        lambda c: f"method={c.method.name} on a CPU: it measures a GPU",
        "hardware=<a GPU>; or smoke=true, which only tries its code",
    ),
    Rule(
        "bench_dtypes",
        lambda c: bool(_dtypes_without_peak(c)),
        lambda c: (
            f"method.args.dtypes={_dtypes_without_peak(c)[0]}: {c.hardware.name} does not "
            "compute in it"
        ),
        lambda c: f"method.args.dtypes=[{','.join(c.hardware.peak_tflops)}], or null for all",
    ),
    Rule(
        "tune_full_rows",
        lambda c: (
            makes_rows(c)
            and (recipe_name(c) == "grpo" or c.method.args.get("max_length", 0) is None)
        ),
        "method.args.rows=full makes rows for sft and dpo, of max_length tokens",
        "method.args.rows=data; or recipe=sft or dpo and method.args.max_length=<tokens>",
    ),
]
