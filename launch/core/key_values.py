"""Parse command lines of key=value, for the doctor and containers/build.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.core.errors import UserError, near


def read(arguments: Sequence[str], defaults: Mapping[str, str], example: str) -> dict[str, str]:
    """Return `defaults` updated with the arguments' values.

    Raises UserError for an unknown or repeated key, and for an argument that is not key=value.
    """
    values: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not value or key not in defaults or key in values:
            raise UserError(
                f"`{argument}`: key=value is expected, once for each key, such as {example}. "
                f"Keys: {', '.join(defaults)}.{near(key, defaults) if key not in defaults else ''}"
            )
        values[key] = value
    return {**defaults, **values}
