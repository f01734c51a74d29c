"""Parse the key=value arguments of launch/doctor.py and containers/build.py."""

from collections.abc import Mapping, Sequence

from launch.core.errors import UserError, near


def read(arguments: Sequence[str], defaults: Mapping[str, str], example: str) -> dict[str, str]:
    """Return `defaults` updated with the arguments' values.

    Raises UserError if a key is unknown or repeated, or if an argument is not key=value.
    """
    values: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not value or key not in defaults or key in values:
            raise UserError(
                f"`{argument}`: use key=value, with each key at most once, such as {example}. "
                f"Keys: {', '.join(defaults)}.{near(key, defaults) if key not in defaults else ''}"
            )
        values[key] = value
    return {**defaults, **values}
