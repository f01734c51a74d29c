"""Arguments that take names of a list, or counts. The names stand once, with the recipe that has them: `make lock` writes them into
containers/trainer_args.lock.json, from which the launcher refuses others without importing torch; a rank refuses what reaches it all the
same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from recipes.common.errors import UserError, near

ALL = object()
MAY_BE_ZERO = ("seed", "warmup", "num_warmups", "num_workers", "paddings")  # of a benchmark's or tuning's whole numbers


def named(known: Callable[[], Iterable[str]], default: object = ALL, refused: Mapping[str, str] | None = None) -> Any:
    """A field of a dataclass that takes a name of `known()`, or a list of them. `refused`: what is none, and why, as somebody may try it.

    `known` is a function, so that a table may stand below the class.
    """
    metadata = {"names": known, "refused": refused or {}}
    if default is ALL:
        return dataclasses.field(default_factory=lambda: list(known()), metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def least(field: dataclasses.Field) -> int | None:
    """Of a field that takes whole numbers, alone or in a list; None for every other."""
    if not re.search(r"\bint\b", str(field.type)):
        return None
    return int(field.metadata.get("least", 0 if field.name in MAY_BE_ZERO else 1))


class Arguments:
    """Base of configuration classes. Raises UserError for a name that a field does not take, and for a whole number below its least."""

    def __post_init__(self) -> None:
        check_values(self)

    def check_filled(self, *names: str) -> None:
        """Raises UserError for a list of these that is empty."""
        for name in names:
            if getattr(self, name) == []:
                raise UserError(f"method.args.{name}=[]: nothing would be measured.")


def check_values(arguments: Any) -> None:
    """Raises UserError for a name that a field of this dataclass does not take, and for a whole number below its least."""
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        listed = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        at_least = least(field)
        if at_least is not None and any(type(one) is int and one < at_least for one in listed):
            raise UserError(f"method.args.{field.name}={value}: {'each ' if listed is value else ''}at least {at_least}.")
        if "names" in field.metadata and value is not None:
            known, refused = list(field.metadata["names"]()), field.metadata["refused"]
            for given in listed:
                if given in refused:
                    raise UserError(f"method.args.{field.name}: {given} {refused[given]}")
                if given not in known:
                    raise UserError(f"method.args.{field.name}={given}: unknown. {near(str(given), known)}")
