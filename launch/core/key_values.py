"""Parse key=value arguments of programs without Hydra, and write values for Hydra's."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from launch.core.errors import UserError, near

# Text that Hydra accepts without quotes, and words that it would then parse as another type.
PLAIN = re.compile(r"[A-Za-z_/][\w./:+@%-]*")
NOT_TEXT = ("true", "false", "null", "nan", "inf")


def read(
    arguments: Sequence[str],
    defaults: Mapping[str, str],
    example: str,
    choices: Mapping[str, Collection[str]] = {},
) -> dict[str, str]:
    """Return `defaults` updated with the arguments' values.

    Raises UserError if a key is unknown or repeated, if an argument is not key=value, or if a value
    is not one of the key's `choices`.
    """
    values: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not value or key not in defaults or key in values:
            raise UserError(
                f"`{argument}`: use key=value, with each key at most once, such as {example}. "
                f"Keys: {', '.join(defaults)}.{near(key, defaults) if key not in defaults else ''}"
            )
        words = choices.get(key, [value])
        if value not in words:
            raise UserError(f"{key}={value}: use one of {', '.join(words)}.{near(value, words)}")
        values[key] = value
    return {**defaults, **values}


def hydra_value(value: Any) -> str:
    """Return a value in the syntax of Hydra's overrides."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(hydra_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    text = str(value)
    is_plain = PLAIN.fullmatch(text) and text.lower() not in NOT_TEXT
    return text if is_plain else "'" + text.replace("'", "\\'") + "'"
