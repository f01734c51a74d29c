"""Rows of check.py's table about benchmarks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from launch import topology
from launch.rule import Rule
from launch.schema import Config
from launch.schema_enums import Vendor
from launch.trainer_args import argument

PUBLISHED = Path(__file__).parents[1] / "recipes/bench/reference"
COMPARED = ("measured", "least")  # kinds of published figures that ours are held against: recipes/bench/published.py
GPU_COUNTS = {"bench/scaling": "num_gpus", "bench/collectives": "ranks"}  # the argument that lists how many are measured together


@functools.cache
def _published(method: str) -> frozenset[str]:
    """The hardware that somebody has published a figure of this benchmark for."""
    path = PUBLISHED / f"{method.removeprefix('bench/')}.yaml"
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    named = [row["hardware"] for row in rows if row.get("kind", "measured") in COMPARED]
    return frozenset(name for names in named for name in ([names] if isinstance(names, str) else names))


def _gate_of_nothing(config: Config) -> bool:
    """A benchmark refuses one too where none of the figures is of the quantity that it measures."""
    is_gate = config.method.kind == "bench" and argument(config, "fail_below") is not None
    return is_gate and config.hardware.name not in _published(config.method.name)


def _lacking_dtypes(config: Config) -> list[str]:
    """Of a benchmark's series of precisions, those without a peak. Under smoke=true the CPU has none."""
    asked = argument(config, "dtypes") or []
    return [] if config.smoke or config.hardware.vendor == Vendor.none else [d for d in asked if d not in config.hardware.peak_tflops]


def _gpu_counts(config: Config) -> list[Any] | None:
    name = GPU_COUNTS.get(config.method.name)
    counts: list[Any] | None = argument(config, name) if name else None
    return counts


def _no_counts(config: Config) -> bool:
    counts = _gpu_counts(config)
    return counts is not None and (not counts or any(type(count) is not int or count < 1 for count in counts))


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
        "bench_dtypes",
        lambda c: bool(_lacking_dtypes(c)),
        lambda c: f"method.args.dtypes={_lacking_dtypes(c)[0]} on {c.hardware.name}: {c.hardware.gfx} does not compute in it",
        lambda c: f"method.args.dtypes=[{','.join(c.hardware.peak_tflops)}], or null for all of them",
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
        "bench_gpu_counts",
        _no_counts,
        lambda c: f"{_shown_counts(c)}: it lists numbers of GPUs that are measured together",
        lambda c: f"whole numbers of at least 1, as method.args.{GPU_COUNTS[c.method.name]}=[2,4]",
    ),
    Rule(
        "bench_num_gpus",
        _too_many_gpus,
        lambda c: f"{_shown_counts(c)}: this run has {topology.num_trainers(c)}, so nothing would be measured",
        lambda c: f"topology.num_gpus={min(_gpu_counts(c) or [])} or more, or fewer in the list",
    ),
]
