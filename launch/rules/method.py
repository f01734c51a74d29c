"""Reject arguments of benchmarks that would measure nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launch.rules.refusal import Refusal
from launch.schema import Config
from launch.schema.trainer_args import argument, class_arguments

# Arguments that are lists of lists of integers: the meaning of an inner list, and an example.
LISTS = {
    "shapes": ("m, n, k", "8192,8192,8192"),
    "heads": ("query heads, key heads, width", "32,8,128"),
    "lengths": ("tokens in, tokens out", "1024,128"),
}
COLLECTIVES = "bench/collectives"
TAKEN_EMPTY = ("dtypes", "settings")  # bench/collectives then measures its defaults


def method_faults(c: Config) -> Iterator[Refusal]:
    method, arguments = c.method.name, class_arguments(c) if c.method.measures_machine else {}
    for name, entry in arguments.items():
        items, key, fault = argument(c, name), f"method.args.{name}", ""
        parts, example = LISTS.get(name, ("", ""))
        if items == [] and not (method == COLLECTIVES and name in TAKEN_EMPTY):
            fault = "nothing would be measured"
        elif parts and not all(_is_numbers(item, parts.count(",") + 1) for item in items or []):
            fault = f"each item must be a list [{parts}] of numbers from 1"
        # a true would become the text True, which NCCL reads as 0
        elif (method, name) == (COLLECTIVES, "settings") and any(
            isinstance(value, (bool, list, dict)) for row in items for value in row.values()
        ):
            fault, example = "each maps variables to texts or numbers", "{NCCL_MIN_NCHANNELS: 112}"
        if fault:
            example = f"[{example}]" if parts else example
            remedy = (
                f"'{key}=[{example}]'"
                if example
                else f"{key}=[...] as in conf/method/{method}.yaml"
            )
            remedy += f"; or {key}=null for all" if entry["default"] is None else ""
            yield Refusal("bench_lists", f"{key}={items}: {fault}", remedy)


def _is_numbers(item: Any, length: int) -> bool:
    return (
        isinstance(item, list)
        and len(item) == length
        and all(type(part) is int and part > 0 for part in item)
    )
