"""Suggest corrections for wrong arguments, words and fields, from near_names.yaml."""

import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from launch.core.errors import near
from launch.core.json_files import yaml_file

FORMS = {  # placeholder in near_names.yaml -> pattern of values that the key accepts
    "count": r"[1-9]\d*",
    "number": r"\d+(\.\d+)?",
    "fraction": r"0?\.\d*[1-9]\d*",
    "switch": r"true|false",
    "path": r"[\w./~+@-]+",  # without characters that need quotes
    "rewards": r"\[?[a-z_][\w.]*( *, *[a-z_][\w.]*)*\]?",
}


@functools.cache
def names(table: str) -> Any:
    """Return a table of near_names.yaml."""
    return yaml_file(Path(__file__).with_name("near_names.yaml"))[table]


def field_hint(row: Mapping[str, Any]) -> str | None:
    """Return how to convert another program's row to TRL's fields; None if it is unknown."""
    return next((form["use"] for form in names("rows") if has_all(row, form["fields"])), None)


def has_all(row: Mapping[str, Any], fields: Collection[str]) -> bool:
    """Return whether a row has all fields, none of them null or empty."""
    return all(str(row.get(name) or "").strip() for name in fields)


def partly_mapped(columns: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Return the rows of near_names.yaml of which `columns` map some fields, with `lost` ones."""
    mapped, handled = {*columns.values()}, {*columns, *columns.values()}
    return [
        {**form, "lost": lost}
        for form in names("rows")
        if mapped & {*form["fields"]} and (lost := [n for n in form["fields"] if n not in handled])
    ]


def columns_hint(fields: Collection[str], needed: Collection[str]) -> str | None:
    """Return overrides that map a row's fields to `needed`; None if a name is not common."""
    overrides = []
    for field in needed:
        if field not in fields:
            name = next((name for name in names("columns").get(field, ()) if name in fields), None)
            if name is None:
                return None
            overrides.append(f"data.columns.{field}={name}")
    return " ".join(overrides)


def key_hint(name: str, arguments: Collection[str], value: Any = "") -> str:
    """Return a hint with the key outside method.args that sets `value`; '' if none is known.

    It has the value if that has the right form, and arguments only if they are in `arguments`.
    """
    key = names("keys").get(name, "")
    text = (value if isinstance(value, str) else json.dumps(value)).replace('"', "")
    needed = key.partition("method.args.")[2].partition(".")[0]
    turns_off = text.lower() in ("false", "0", "null", "no", "off") and "{" not in key
    if not key or turns_off or (needed and needed not in arguments):
        return ""
    is_right = {form: re.fullmatch(pattern, text, re.I) for form, pattern in FORMS.items()}
    shown = {form: text if is_right[form] else "<value>" for form in FORMS}
    shown["rewards"] = rewards(text if is_right["rewards"] else "<name>")
    return f" Use: {key.format_map(shown)}."


def rewards(text: str) -> str:
    """Return the entries of method.rewards for a name, or for a list of names."""
    return ", ".join(f"{name.strip()}: 1.0" for name in text.strip("[]").split(","))


def argument_hint(name: str, arguments: Collection[str], value: Any = "") -> str:
    """Return a hint for an unknown argument, such as ' Did you mean a?'; '' if none is similar."""
    if (near_name := names("arguments").get(name)) in arguments:
        return f" Did you mean {near_name}?"
    return key_hint(name, arguments, value) or near(name, arguments)


def word_hint(argument: str, word: str, words: Collection[str]) -> str:
    """Return a hint for an unknown value of an argument or group; '' if no value is similar."""
    near_word = names("words").get(argument, {}).get(word.lower())
    if near_word and near_word not in words:
        return f" Use: {near_word}."
    return f" Did you mean {near_word}?" if near_word else near(word.lower(), words)
