"""Reject arguments of benchmarks, samplings and cycles that would measure or keep nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launch.rules.refusal import Refusal
from launch.schema import Config
from launch.schema.trainer_args import argument, own

# Arguments that are lists of lists of integers: the meaning of an inner list, and an example.
LISTS = {
    "shapes": ("m, n, k", "8192,8192,8192"),
    "heads": ("query heads, key heads, width", "32,8,128"),
    "lengths": ("tokens in, tokens out", "1024,128"),
}
COLLECTIVES = "bench/collectives"
TAKEN_EMPTY = ("dtypes", "settings")  # bench/collectives then measures its defaults
OF_CYCLES = ("cycle", "num_cycles")  # set by method=raft for each of its phases


def method_faults(c: Config) -> Iterator[Refusal]:
    method, arguments = c.method.name, own(c) if c.method.measures_machine else {}
    for name, entry in arguments.items():
        items, key = argument(c, name), f"method.args.{name}"
        if items == [] and not (method == COLLECTIVES and name in TAKEN_EMPTY):
            remedy = f"{key}=[...] as in conf/method/{method}.yaml"
            remedy += f"; or {key}=null for all" if entry["default"] is None else ""
            yield Refusal("bench_lists", f"{key}=[]: nothing would be measured", remedy)
        parts, example = LISTS.get(name, ("", ""))
        if parts and not all(_is_numbers(item, parts.count(",") + 1) for item in items or []):
            message = f"{key}={items}: each item must be a list [{parts}] of numbers from 1"
            yield Refusal("bench_lists", message, f"{key}=[[{example}]]")
    for setting in argument(c, "settings") if method == COLLECTIVES else ():
        # a true would become the text True, which NCCL reads as 0
        if any(isinstance(value, (bool, list, dict)) for value in setting.values()):
            message = f"method.args.settings: {setting} must map variables to texts or numbers"
            remedy = "'method.args.settings=[{NCCL_MIN_NCHANNELS: 112}]'"
            yield Refusal("bench_lists", message, remedy)
    for name in argument(c, "sample") or {} if c.method.has_cycles else ():
        if name in OF_CYCLES:
            message = f"method.args.sample.{name}: RAFT sets this in each cycle"
            remedy = "method.args.cycles=N, or method=sample by itself"
            yield Refusal("raft_decides", message, remedy)


def _is_numbers(item: Any, length: int) -> bool:
    return (
        isinstance(item, list)
        and len(item) == length
        and all(type(part) is int and part > 0 for part in item)
    )
