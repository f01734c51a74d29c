"""Reject lists of a benchmark that are empty or wrong, and unknown arguments of generation."""

from __future__ import annotations

from collections.abc import Iterator

from launch.core.errors import near
from launch.estimate.rank_state import generates_with_vllm
from launch.rules.refusal import Refusal
from launch.schema import Config
from launch.schema.trainer_args import class_arguments, lock, value_or_none

# Argument that is a list of lists of integers -> the meaning of an inner list, and an example.
LISTS = {
    "shapes": ("m, n, k", "8192,8192,8192"),
    "heads": ("query heads, key heads, width", "32,8,128"),
    "lengths": ("tokens in, tokens out", "1024,128"),
}
COLLECTIVES = "bench/collectives"
MAY_BE_EMPTY = ("dtypes", "settings")  # bench/collectives then measures its defaults


def method_problems(c: Config) -> Iterator[Refusal]:
    method, arguments = c.method.name, class_arguments(c) if c.method.measures_machine else {}
    for name, entry in arguments.items():
        items, key, problem = value_or_none(c, name), f"method.args.{name}", ""
        parts, example = LISTS.get(name, ("", ""))
        if items == [] and not (method == COLLECTIVES and name in MAY_BE_EMPTY):
            problem = "nothing would be measured"
        elif parts and not all(
            isinstance(item, list)
            and len(item) == parts.count(",") + 1
            and all(type(number) is int and number > 0 for number in item)
            for item in items or []
        ):
            problem = f"each item must be a list [{parts}] of integers above 0"
        # NCCL reads the text "True" as 0.
        elif (method, name) == (COLLECTIVES, "settings") and any(
            isinstance(value, (bool, list, dict)) for row in items for value in row.values()
        ):
            problem = "each item must map variables to strings or numbers"
            example = "{NCCL_MIN_NCHANNELS: 112}"
        if problem:
            example = f"[{example}]" if parts else example
            remedy = f"{key}=[...] as in conf/method/{method}.yaml"
            remedy = f"'{key}=[{example}]'" if example else remedy
            remedy += f"; or {key}=null for all" if entry["default"] is None else ""
            yield Refusal("bench_lists", f"{key}={items}: {problem}", remedy)


def generation_problems(c: Config) -> Iterator[Refusal]:
    """Reject names in generation_kwargs that transformers would ignore. vLLM raises an error."""
    key, names = "method.args.generation_kwargs", value_or_none(c, "generation_kwargs") or {}
    for name in names if not generates_with_vllm(c) else ():
        if name not in lock()["generation"]:
            hint = near(name, lock()["generation"])
            message = f"{key}.{name}: transformers' generate() has no such argument.{hint}"
            yield Refusal("generation_arguments", message, f"'~{key}.{name}'")
