"""Define rules about benchmarks.

A benchmark itself rejects gates, sizes and numbers of GPUs before it measures.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.trainer_args import argument, own

# Arguments that are lists of lists of integers: the meaning of an inner list, and an example.
LISTS = {
    "shapes": ("m, n, k", "8192,8192,8192"),
    "heads": ("query heads, key heads, width", "32,8,128"),
    "lengths": ("tokens in, tokens out", "1024,128"),
}
COLLECTIVES = "bench/collectives"
TAKEN_EMPTY = ("dtypes", "settings")  # bench/collectives then measures its defaults


def _empty_lists(config: Config) -> list[str]:
    if not config.method.measures_machine:
        return []
    taken = TAKEN_EMPTY if config.method.name == COLLECTIVES else ()
    return [name for name in own(config) if name not in taken and argument(config, name) == []]


def _bad_environments(config: Config) -> list[Any]:
    """Return settings of bench/collectives that are not environment variables.

    A `true` would become the text True.
    """
    if config.method.name != COLLECTIVES:
        return []

    def is_environment(setting: Any) -> bool:
        return (
            isinstance(setting, dict)
            and bool(setting)
            and all(isinstance(name, str) and name for name in setting)
            and all(type(value) in (str, int, float, NoneType) for value in setting.values())
        )

    return [setting for setting in argument(config, "settings") if not is_environment(setting)]


def _dtypes_without_peak(config: Config) -> list[str]:
    dtypes = argument(config, "dtypes") or []
    if config.smoke or config.hardware.vendor == Vendor.none:
        return []
    return [dtype for dtype in dtypes if dtype not in config.hardware.peak_tflops]


def _bad_lists(config: Config) -> list[str]:
    def is_bad(item: Any, parts: str) -> bool:
        return (
            not isinstance(item, list)
            or len(item) != parts.count(",") + 1
            or any(type(part) is not int or part < 1 for part in item)
        )

    if not config.method.measures_machine:
        return []
    return [
        name
        for name, (parts, _) in LISTS.items()
        if any(is_bad(item, parts) for item in argument(config, name) or [])
    ]


BENCH_RULES = [
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
        "bench_lists",
        lambda c: bool(_bad_lists(c)),
        lambda c: (
            f"method.args.{(name := _bad_lists(c)[0])}={argument(c, name)}: each item must be "
            f"a list [{LISTS[name][0]}] of numbers from 1"
        ),
        lambda c: f"method.args.{(name := _bad_lists(c)[0])}=[[{LISTS[name][1]}]]",
    ),
    Rule(
        "bench_empty_lists",
        lambda c: bool(_empty_lists(c)),
        lambda c: f"method.args.{_empty_lists(c)[0]}=[]: nothing would be measured",
        lambda c: (
            f"one item or more, as in conf/method/{c.method.name}.yaml"
            + ("; or null for all" if own(c)[_empty_lists(c)[0]]["default"] is None else "")
        ),
    ),
    Rule(
        "bench_environments",
        lambda c: bool(_bad_environments(c)),
        lambda c: (
            f"method.args.settings: {_bad_environments(c)[0]} must map environment variables "
            "to texts, numbers or null"
        ),
        "'method.args.settings=[{NCCL_MIN_NCHANNELS: 112}]'",
    ),
]
