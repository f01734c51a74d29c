"""Declare arguments whose values are known names or whole numbers.

`make lock` writes the names into containers/trainer_args.lock.json, so that the launcher rejects
other names and numbers without importing torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ALL = object()
# Whole-number arguments of benchmarks and tunings that may be 0.
MAY_BE_ZERO = ("seed", "warmup", "num_warmups", "num_workers", "paddings")


def named(
    known: Callable[[], Iterable[str]],
    default: object = ALL,
    refused: Mapping[str, str] | None = None,
) -> Any:
    """Declare a dataclass field that takes a name of `known()`, or a list of them.

    `refused` maps names that a user may try to the reasons why they are rejected. `known` is a
    function so that its table may be defined below the class.
    """
    metadata = {"names": known, "refused": refused or {}}
    if default is ALL:
        return dataclasses.field(default_factory=lambda: list(known()), metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def least(field: dataclasses.Field) -> int | None:
    """Return the minimum of a field of type int or list of int; None for other fields."""
    if not re.search(r"\bint\b", str(field.type)):
        return None
    return int(field.metadata.get("least", 0 if field.name in MAY_BE_ZERO else 1))
