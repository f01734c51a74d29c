"""Format values for a page, and define the titles of metrics and the marks of statuses."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from launch.core.json_files import is_number, yaml_file

TITLES: dict[str, Any] = yaml_file(Path(__file__).with_name("titles.yaml"))
NONE = "–"  # a missing value
# The marks of the status of a run, trial or stage; any other status is bad.
STATUS_MARKS = {"done": "good", "interrupted": "warn", "unknown": "warn", "gone": "warn"}
STATUS_MARKS |= dict.fromkeys(("running", "waiting", "mixed", "not run"), "")


def mark_of(status: str) -> str:
    return STATUS_MARKS.get(status, "bad")


def number(value: float, digits: int | None = None) -> str:
    """Format a number like 12,346; 1.573; 0.0021; 2.5e-05; 1e+15, or with `digits` decimals."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.4g}"
    if digits is not None:
        return f"{value:,.{digits}f}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}" if value else "0"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{share:.2%}" if abs(share) < 0.01 else f"{share:.1%}"


def ratio(part: Any, whole: Any, form: str = "") -> str:
    """Format part/whole in percent or by `form`; return '' if one of them is missing."""
    if not (is_number(part) and is_number(whole) and whole):
        return ""
    return form.format(part / whole) if form else percent(part / whole)


def duration(seconds: float) -> str:
    """Format a time like 42.1 s or, from a minute, 2:10:05."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))


def text(value: Any) -> str:
    """Format a value of a configuration as in YAML, with lists as comma-separated items."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value)) or "[]"
    return str(value)
