"""Declare which names and whole numbers the arguments of benchmarks and tuning runs accept.

`make lock` writes them to containers/trainer_args.lock.json, so that the launcher rejects other
values without importing torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ALL = object()
# Whole-number arguments of benchmarks and tuning runs that may be 0.
MAY_BE_ZERO = ("seed", "warmup", "num_warmups", "num_workers", "paddings")


def name_field(
    known: Callable[[], Iterable[str]],
    default: object = ALL,
    refused: Mapping[str, str] | None = None,
) -> Any:
    """Declare a dataclass field that accepts one of the names `known()`, or a list of them.

    By default, the field is a list of all names. `refused` maps names that a user may try to the
    reasons why they are rejected. `known` is a function so that the table of names may be defined
    after the class.
    """
    metadata = {"names": known, "refused": refused or {}}
    if default is ALL:
        return dataclasses.field(default_factory=lambda: list(known()), metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def minimum(field: dataclasses.Field) -> int | None:
    """Return the minimum of a field of type int or list of int; None for other fields."""
    if not re.search(r"\bint\b", str(field.type)):
        return None
    return int(field.metadata.get("minimum", 0 if field.name in MAY_BE_ZERO else 1))
