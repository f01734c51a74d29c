"""Rows of check.py's table about benchmarks."""

from __future__ import annotations

import functools
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from launch import topology
from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.trainer_args import argument, own

PUBLISHED = Path(__file__).parents[2] / "recipes/bench/reference"
# Arguments that list lists, and what stands in one.
LISTS = {"shapes": "m, n, k", "heads": "query heads, key heads, width", "lengths": "tokens in, tokens out"}
EXAMPLES = {"shapes": "8192,8192,8192", "heads": "32,8,128", "lengths": "1024,128"}
COMPARED = ("measured", "least")  # kinds of published figures that ours are held against: recipes/bench/published.py
GPU_COUNTS = {"bench/scaling": "num_gpus", "bench/collectives": "ranks"}  # the argument that lists how many are measured together
TAKEN_EMPTY = {"bench/collectives": ("dtypes", "settings")}  # lists that stand for more than is in them


@functools.cache
def _rows(method: str) -> list[dict[str, Any]]:
    """What was published of this benchmark and ours is held against; `hardware` is a list in each."""
    path = PUBLISHED / f"{method.removeprefix('bench/')}.yaml"
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    named = [{**row, "hardware": [row["hardware"]] if isinstance(row["hardware"], str) else row["hardware"]} for row in rows]
    return [row for row in named if row.get("kind", "measured") in COMPARED]


def _published(method: str) -> set[str]:
    """The hardware that somebody has published a figure of this benchmark for."""
    return {name for row in _rows(method) for name in row["hardware"]}


def _is_gate(config: Config) -> bool:
    return config.method.kind == "bench" and argument(config, "fail_below") is not None


def _gate_of_nothing(config: Config) -> bool:
    """A benchmark refuses one too where none of the figures is of the quantity that it measures."""
    return _is_gate(config) and config.hardware.name not in _published(config.method.name)


def _matches(config: Config) -> list[dict[str, Any]]:
    """What rows published of this hardware, and of the benchmark's own figure, are found by."""
    return [row["match"] for row in _rows(config.method.name) if config.hardware.name in row["hardware"] and "figure" not in row]


def _gate_of_other_rows(config: Config) -> bool:
    """A benchmark refuses one too that its figures decide about."""
    if not _is_gate(config) or _gate_of_nothing(config) or _no_counts(config) or _empty_lists(config) or _bad_sizes(config):
        return False
    ours = _of_our_rows(config)
    return not any(all(match[key] in values for key, values in ours.items() if key in match) for match in _matches(config))


def _of_our_rows(config: Config) -> dict[str, list[Any]]:
    """Values that rows have of keys which the arguments of a benchmark decide."""
    ranks = topology.num_trainers(config)
    if config.method.name == "bench/collectives":
        counts = [count for count in _gpu_counts(config) or [] if count <= ranks]
        return {"op": argument(config, "ops"), "bytes": _sizes(config), "ranks": counts}
    if config.method.name == "bench/gemm":
        shapes = [" ".join(map(str, shape)) for shape in argument(config, "shapes") if isinstance(shape, list)]
        dtypes = argument(config, "dtypes") or list(config.hardware.peak_tflops)
        return {"shape": shapes, "dtype": dtypes, "op": argument(config, "ops")}
    if config.method.name == "bench/finetune":
        return {"num_gpus": [ranks], "batch": [argument(config, "batch")], "sequence": [argument(config, "sequence")]}
    if config.method.name == "bench/precision":
        return {"precision": argument(config, "precisions")}
    return {}


def _sizes(config: Config) -> list[int]:
    """As recipes/bench/collectives.py has them."""
    first, last, factor = (int(argument(config, name)) for name in ("min_bytes", "max_bytes", "factor"))
    found = [first]
    while first > 0 and factor > 1 and found[-1] * factor < last:
        found.append(found[-1] * factor)
    return [*found, last]


def _bad_sizes(config: Config) -> bool:
    """As recipes/bench/collectives.py refuses them. Each rank of a collective has a part of the array, in fp32 at most."""
    if config.method.name != "bench/collectives":
        return False
    first, last, factor = (argument(config, name) for name in ("min_bytes", "max_bytes", "factor"))
    return factor < 2 or not _least_bytes(config) <= first <= last


def _least_bytes(config: Config) -> int:
    return 1 if _no_counts(config) else 4 * max(_gpu_counts(config) or [1])


def _empty_lists(config: Config) -> list[str]:
    """Lists of which nothing would be measured. Numbers of GPUs have a rule of their own."""
    if config.method.kind not in ("bench", "tune"):
        return []
    others = (*TAKEN_EMPTY.get(config.method.name, ()), GPU_COUNTS.get(config.method.name))
    return [name for name in own(config) if name not in others and argument(config, name) == []]


def _wrong_environments(config: Config) -> list[Any]:
    """Settings of collectives are environment variables; one that sets none is the run's own, which is measured in any case."""

    def sets(one: Any) -> bool:
        names = [name for name in one if isinstance(name, str) and name] if isinstance(one, dict) else []
        return bool(names) and len(names) == len(one) and all(type(value) in (str, int, float, NoneType) for value in one.values())

    return [one for one in argument(config, "settings") if not sets(one)] if config.method.name == "bench/collectives" else []


def _shown_matches(config: Config) -> str:
    shown = [", ".join(f"{key} {value}" for key, value in match.items()) for match in _matches(config)]
    shown = list(dict.fromkeys(shown))
    return "; ".join(shown[:4]) + (f"; and {len(shown) - 4} more" if len(shown) > 4 else "")


def _lacking_dtypes(config: Config) -> list[str]:
    """Of a benchmark's series of precisions, those without a peak. Under smoke=true the CPU has none."""
    asked = argument(config, "dtypes") or []
    return [] if config.smoke or config.hardware.vendor == Vendor.none else [d for d in asked if d not in config.hardware.peak_tflops]


def _wrong_lists(config: Config) -> list[str]:
    """Arguments that list lists of whole numbers, where one is none."""

    def is_wrong(one: Any, parts: str) -> bool:
        return not isinstance(one, list) or len(one) != parts.count(",") + 1 or any(type(part) is not int or part < 1 for part in one)

    measures = config.method.kind in ("bench", "tune")
    return [name for name, parts in LISTS.items() if measures and any(is_wrong(one, parts) for one in argument(config, name) or [])]


def _crowded(config: Config) -> list[tuple[int, Any]]:
    """Of settings of vLLM that put several engines on a GPU: how many, and the share of its memory that each takes, if that is too much."""
    if config.method.name != "bench/vllm":
        return []
    settings = [{**argument(config, "base"), **setting} for setting in argument(config, "settings") if isinstance(setting, dict)]
    asked = [(one.get("instances", 1), one.get("gpu_memory_utilization")) for one in settings]
    return [(n, share) for n, share in asked if type(n) is int and n > 1 and (not isinstance(share, (int, float)) or share * n > 1)]


def _gpu_counts(config: Config) -> list[Any] | None:
    name = GPU_COUNTS.get(config.method.name)
    counts: list[Any] | None = argument(config, name) if name else None
    return counts


def _no_counts(config: Config) -> bool:
    counts = _gpu_counts(config)
    return counts is not None and (not counts or any(type(count) is not int or count < _least_count(config) for count in counts))


def _least_count(config: Config) -> int:
    return 2 if config.method.name == "bench/collectives" else 1


def _too_many_gpus(config: Config) -> bool:
    counts, ranks = _gpu_counts(config), topology.num_trainers(config)
    return counts is not None and not _no_counts(config) and min(counts) > ranks > 1  # one rank is refused as such


def _shown_counts(config: Config) -> str:
    return f"method.args.{GPU_COUNTS[config.method.name]}={_gpu_counts(config)}"


BENCH_RULES = [
    Rule(
        "bench_without_gpu",
        lambda c: c.method.kind in ("bench", "tune") and c.hardware.vendor == Vendor.none and not c.smoke,
        lambda c: f"method={c.method.name} on a CPU: it measures a GPU",
        lambda c: "smoke=true, which runs its code on this CPU and whose figures say nothing; or hardware=<a GPU>",
    ),
    Rule(
        "bench_data",
        lambda c: not c.method.reads("data") and c.data.name != "reasoning",
        lambda c: f"data={c.data.name} with method={c.method.name}: it makes what it measures, and would ignore the data",
        lambda c: "no data=; or data=reasoning, where a file sets another",
    ),
    Rule(
        "bench_dtypes",
        lambda c: bool(_lacking_dtypes(c)),
        lambda c: f"method.args.dtypes={_lacking_dtypes(c)[0]} on {c.hardware.name}: {c.hardware.gfx} does not compute in it",
        lambda c: f"method.args.dtypes=[{','.join(c.hardware.peak_tflops)}], or null for all of them",
    ),
    Rule(
        "bench_lists",
        lambda c: bool(_wrong_lists(c)),
        lambda c: f"method.args.{(name := _wrong_lists(c)[0])}={argument(c, name)}: it lists lists of [{LISTS[name]}], each at least 1",
        lambda c: f"double brackets: method.args.{(name := _wrong_lists(c)[0])}=[[{EXAMPLES[name]}]]",
    ),
    Rule(
        "bench_empty_lists",
        lambda c: bool(_empty_lists(c)),
        lambda c: f"method.args.{_empty_lists(c)[0]}=[]: nothing would be measured",
        lambda c: (
            f"one or more in it, as in conf/method/{c.method.name}.yaml"
            + ("; or null for all" if own(c)[_empty_lists(c)[0]]["default"] is None else "")
        ),
    ),
    Rule(
        "bench_environments",
        lambda c: bool(_wrong_environments(c)),
        lambda c: f"method.args.settings: {_wrong_environments(c)[0]} sets no environment variables, each to a text, a number or null",
        lambda c: "'method.args.settings=[{NCCL_MIN_NCHANNELS: 112}]'; the run's own environment is measured in any case",
    ),
    Rule(
        "bench_sizes",
        _bad_sizes,
        lambda c: (
            f"method.args.min_bytes={argument(c, 'min_bytes')}, max_bytes={argument(c, 'max_bytes')}, factor={argument(c, 'factor')}: "
            "sizes rise from the first to the last, and each rank has at least 4 bytes"
        ),
        lambda c: f"min_bytes of at least {_least_bytes(c)} and at most max_bytes, factor of at least 2",
    ),
    Rule(
        "bench_instances",
        lambda c: bool(_crowded(c)),
        lambda c: (
            f"method.args.settings: {_crowded(c)[0][0]} instances on one GPU with gpu_memory_utilization={_crowded(c)[0][1] or 'unset'}: "
            "together they take at most 1"
        ),
        lambda c: f"gpu_memory_utilization: {0.8 / _crowded(c)[0][0]:g} in that setting",
    ),
    Rule(
        "bench_gate",
        _gate_of_nothing,
        lambda c: (
            f"method.args.fail_below={argument(c, 'fail_below')} with method={c.method.name} on {c.hardware.name}: nobody has published "
            f"a figure of it, so nothing could fall below; of others: {', '.join(sorted(_published(c.method.name))) or 'neither'}"
        ),
        lambda c: f"no fail_below, or figures of your own in recipes/bench/reference/{c.method.name.removeprefix('bench/')}.yaml",
    ),
    Rule(
        "bench_gate_rows",
        _gate_of_other_rows,
        lambda c: (
            f"method.args.fail_below={argument(c, 'fail_below')} with method={c.method.name} on {c.hardware.name}: figures were published, "
            "but of no row that would be measured, so nothing could fall below"
        ),
        lambda c: f"no fail_below, or arguments that measure what was published: {_shown_matches(c)}",
    ),
    Rule(
        "bench_gpu_counts",
        _no_counts,
        lambda c: f"{_shown_counts(c)}: it lists numbers of GPUs that are measured together",
        lambda c: f"whole numbers of at least {_least_count(c)}, as method.args.{GPU_COUNTS[c.method.name]}=[2,4]",
    ),
    Rule(
        "bench_num_gpus",
        _too_many_gpus,
        lambda c: f"{_shown_counts(c)}: this run has {topology.num_trainers(c)}, so nothing would be measured",
        lambda c: f"topology.num_gpus={min(_gpu_counts(c) or [])} or more, or fewer in the list",
    ),
]
