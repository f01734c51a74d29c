"""Command lines of key=value: the doctor's, and that of containers/build.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.errors import UserError, near


def read(arguments: Sequence[str], defaults: Mapping[str, str], example: str) -> dict[str, str]:
    """`defaults` with what is given in their place. Raises UserError for no key=value, an unknown key, and a key given twice."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not value:
            raise UserError(f"`{argument}`: key=value is expected, such as {example}. Keys: {', '.join(defaults)}.{near(key, defaults)}")
        if key not in defaults:
            raise UserError(f"There is no key `{key}`. Keys: {', '.join(defaults)}.{near(key, defaults)}")
        if key in given:
            raise UserError(f"{key}={given[key]} and {argument}: one value is taken. Leave one of them out.")
        given[key] = value
    return {**defaults, **given}
