"""Check arguments whose values are known names or whole numbers.

`make lock` writes the names into containers/trainer_args.lock.json, so that the launcher rejects
other names without importing torch. Ranks check them again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launch.core.errors import UserError, near_or_all

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


class Arguments:
    """Check names and whole numbers of the configuration classes that derive from this."""

    def __post_init__(self) -> None:
        check_values(self)


def check_values(arguments: Any) -> None:
    """Raise UserError for an unknown name, and for a whole number below its minimum."""
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        listed = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        at_least = least(field)
        if at_least is not None and any(
            type(number) is int and number < at_least for number in listed
        ):
            each = "each " if listed is value else ""
            raise UserError(f"method.args.{field.name}={value}: {each}at least {at_least}.")
        if "names" in field.metadata and value is not None:
            known, refused = list(field.metadata["names"]()), field.metadata["refused"]
            for name in listed:
                if name in refused:
                    raise UserError(f"method.args.{field.name}: {name} {refused[name]}")
                if name not in known:
                    raise UserError(
                        f"method.args.{field.name}={name}: unknown.{near_or_all(str(name), known)}"
                    )
