"""Explain error messages of failed processes and suggest remedies, from meanings.yaml."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launch.core.json_files import yaml_file


@functools.cache
def table() -> list[dict[str, Any]]:
    return list(yaml_file(Path(__file__).with_name("meanings.yaml")))


def explain(*texts: Iterable[str]) -> str | None:
    """Return the explanation of the first text that matches a pattern; None if none matches."""
    flags = re.IGNORECASE | re.MULTILINE
    for lines in texts:
        text = "\n".join(lines)
        for row in table():
            if re.search("|".join(row["patterns"]), text, flags):
                return str(row["means"])
    return None
