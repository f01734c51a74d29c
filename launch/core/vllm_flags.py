"""Format arguments as command-line flags of vLLM's programs."""

import json
from collections.abc import Mapping
from typing import Any


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the flags. True and False become --flag and --no-flag, mappings JSON; skip None."""
    argv: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, (list, tuple)):
            argv += [f"--{option}", *map(str, value)]
        elif value is not None:
            argv += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return argv
