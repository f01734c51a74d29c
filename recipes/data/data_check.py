"""Check that a row has the fields that a method reads, and values that its trainer accepts."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

from launch.core.errors import UserError
from launch.core.near_names import field_hint
from recipes.data.data_select import TEMPLATE_FIELDS, Row, has_equal_sides

# Method -> TRL's dataset formats as sets of fields. A row needs all fields of one set.
FORMATS: dict[str, list[set[str]]] = {
    "sft": [{"prompt", "completion"}, {"messages"}, {"text"}],
    "dpo": [{"chosen", "rejected"}],
    "grpo": [{"prompt"}],
    "evaluate": [{"prompt", "answer"}],
    "samples": [{"prompt", "completion", "score"}],
}
READ = {
    "sft": ("prompt", "completion", "messages", "text", *TEMPLATE_FIELDS),
    "dpo": ("prompt", "chosen", "rejected", *TEMPLATE_FIELDS),
    "grpo": ("prompt",),
    "evaluate": ("prompt", "answer"),
    "samples": ("prompt", "completion", "score"),
}
REWARDS_READ = {"grpo": ("answer",)}  # optional in training; evaluating the same rows needs it
# Fields that must end with an answer, which the method learns
ANSWERS = {
    "sft": ("messages", "completion"),
    "dpo": ("chosen", "rejected"),
    "samples": ("completion",),
}
# The roles in TRL's datasets, plus developer for templates such as gpt-oss's.
ROLES = ("system", "developer", "user", "assistant", "tool")
QUOTED = 60  # characters of a value, in an error


def is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        return False
    if value.get("content") is None:  # another field, such as a tool call, must be set
        return any(item for name, item in value.items() if name != "role")
    return isinstance(value["content"], (str, list))


def are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def are_tools(value: Any) -> bool:
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return False
    return isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)


def is_of(*types: type) -> Callable[[Any], bool]:
    """Return a check for exact types, so that true is not a number."""
    return lambda value: type(value) in types


MESSAGES = f"a list of one or more messages {{role, content}} with roles of {', '.join(ROLES)}"
# Field -> its check, and what it must be
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (is_of(str), "text"),
    "answer": (is_of(str, int, float), "text or a number"),
    "messages": (are_messages, MESSAGES),
    "tools": (are_tools, "a list of tools, each an object, or its JSON"),
    "chat_template_kwargs": (is_of(dict), "an object {name: value}"),
    "score": (
        lambda value: type(value) in (int, float) and math.isfinite(value),
        "a finite number, by which samples are compared",
    ),
}
TEXT_OR_MESSAGES = (
    lambda value: isinstance(value, str) or are_messages(value),
    f"text or {MESSAGES}",
)


def check_row(row: Row, where: str, method: str) -> None:
    """Raise UserError, starting with `where`, if `method` cannot read or learn from a row."""
    if fault := row_fault(row, method):
        raise UserError(f"{where}: {fault}")


def row_fault(row: Row, method: str) -> str | None:
    """Return what is wrong with a row and how to fix it, or None if nothing is."""
    forms = FORMATS[method]
    if not any(form <= row.keys() for form in forms):
        needed = ", or ".join(" and ".join(sorted(form)) for form in forms)
        remedy = field_hint(row.keys())
        return (
            f"has the fields {', '.join(sorted(row)) or '(none)'}, and {method} needs "
            f"{needed}.{f' Use: {remedy}.' if remedy else ''}"
        )
    # In a table of rows in several formats, the fields of a row's other formats are null.
    complete = _complete(_present(row), method)
    if len(complete) > 1:
        fields = ", and ".join(" and ".join(sorted(form)) for form in complete)
        return (
            f"has {fields}, but {method} would read only one of them. Remove the fields that "
            "should not be learned."
        )
    other_forms = len(forms) > 1 and bool(complete)
    rewards = REWARDS_READ.get(method, ())
    for name in (*READ[method], *rewards):
        may_be_null = other_forms or name in (*TEMPLATE_FIELDS, *rewards)
        if name not in row or (may_be_null and row[name] is None):
            continue
        value, (is_right, expected) = row[name], VALUES.get(name, TEXT_OR_MESSAGES)
        if not is_right(value):
            items = value if isinstance(value, list) and "messages" in expected else ()
            wrong = next((item for item in items if not is_message(item)), value)
            text = json.dumps(wrong, ensure_ascii=False, default=str)  # as in the file
            return f"{name} has {text:.{QUOTED}}, but must be {expected}."
        learned = name in ANSWERS.get(method, ())
        if learned and isinstance(value, list) and value[-1]["role"] != "assistant":
            return (
                f"{name} ends with a turn of {value[-1]['role']}, but the last turn must be the "
                f"assistant's answer, from which {method} learns. Remove the row, or what follows "
                "its last answer."
            )
    if method == "dpo" and has_equal_sides(row):  # its gradient is zero
        return (
            "chosen and rejected are equal, so nothing is preferred. Remove the row, or give two "
            "different answers."
        )
    return None


def read_of(row: Row, method: str) -> list[str]:
    """Return the fields of a row that are passed to the trainer.

    Fields of incomplete formats are left out: with a prompt that is null, or one next to messages
    or text, TRL would expect a completion too.
    """
    return _read_of(_present(row), method)


@functools.lru_cache  # few sets of fields occur in a file
def _read_of(present: frozenset[str], method: str) -> list[str]:
    complete = _complete(present, method)
    incomplete = {name for form in FORMATS[method] if form not in complete for name in form}
    return [name for name in READ[method] if name in present and name not in incomplete]


def _present(row: Row) -> frozenset[str]:
    """Return the fields whose value is not null."""
    return frozenset([name for name, value in row.items() if value is not None])


@functools.lru_cache
def _complete(present: frozenset[str], method: str) -> list[set[str]]:
    return [form for form in FORMATS[method] if form <= present]
