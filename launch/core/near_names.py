"""Guess what users mean by a wrong argument, word or field, from near_names.yaml."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from launch.core.errors import near
from launch.core.json_files import yaml_file


@functools.cache
def names(table: str) -> Any:
    return yaml_file(Path(__file__).with_name("near_names.yaml"))[table]


def renaming(fields: Collection[str]) -> str | None:
    """Return how to turn a row with another program's fields into TRL's; None if unknown."""
    return next((row["use"] for row in names("rows") if {*row["fields"]} <= {*fields}), None)


def argument_meant(name: str, arguments: Collection[str]) -> str:
    """Return a hint at the argument or key that the user may mean by `name`; '' if none is near."""
    if (near_name := names("arguments").get(name)) in arguments:
        return f" Did you mean {near_name}?"
    key = names("keys").get(name)
    return f" Use: {key}." if key else near(name, arguments)


def word_meant(argument: str, word: str, words: Collection[str]) -> str:
    near_word = names("words").get(argument, {}).get(word.lower())
    return f" Did you mean {near_word}?" if near_word in words else near(word.lower(), words)
