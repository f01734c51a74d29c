"""One row of the tables in check.py and check_runtime.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.schema import Config


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[Config], bool]
    message: Callable[[Config], str]
    remedy: Callable[[Config], str]
