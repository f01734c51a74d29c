"""Explain the last lines of a failed process, and what helps (meanings.yaml)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def table() -> list[dict[str, Any]]:
    return list(yaml.safe_load(Path(__file__).with_name("meanings.yaml").read_text("utf-8")))


def of(lines: Iterable[str]) -> str | None:
    """Return what these lines mean; None if no pattern matches."""
    text, flags = "\n".join(lines), re.IGNORECASE | re.MULTILINE
    rows = (row for row in table() if re.search("|".join(row["patterns"]), text, flags))
    return next((str(row["means"]) for row in rows), None)
