"""Check that a row has the fields that a method reads, and values that its trainer accepts."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from typing import Any

from launch.core.errors import UserError, near
from launch.core.near_names import renaming
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
    "samples": ("prompt", "completion"),
}
REWARDS_READ = {"grpo": ("answer",)}  # optional in training; evaluating the same rows needs it
MESSAGES = "a list of one or more messages {role, content}"
EXPECTED = {
    "text": "text",
    "answer": "text or a number",
    "messages": MESSAGES,
    "tools": "a list of tools, each an object, or its JSON",
    "chat_template_kwargs": "an object {name: value}",
}
# Exact types, so that true is not a number
TYPES = {"text": [str], "answer": [str, int, float], "chat_template_kwargs": [dict]}
# The roles in TRL's datasets, plus developer for templates such as gpt-oss's.
ROLES = ("system", "developer", "user", "assistant", "tool")
RENAMED = {
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "chatbot", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation"), "tool"),
}
# Fields that must end with an answer, which the method learns
ANSWERS = {
    "sft": ("messages", "completion"),
    "dpo": ("chosen", "rejected"),
    "samples": ("completion",),
}
QUOTED = 60  # characters of a value, in an error


def check_format(method: str | None) -> None:
    """Raise UserError if a method's `rows` names no format."""
    if method not in FORMATS:
        raise UserError(
            f"method.rows={method}: no such row format. Use one of {', '.join(FORMATS)}, or add it "
            "to FORMATS and READ in recipes/data/data_check.py."
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
        remedy = renaming(row.keys())
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
        if fault := _fault(name, row[name]):
            expected = EXPECTED.get(name, f"text or {MESSAGES}")
            return f"{name} is {fault}, but must be {expected}."
        if isinstance(row[name], list) and name not in TEMPLATE_FIELDS:
            roles = [message["role"] for message in row[name]]
            if fault := _role_fault(name, roles, method):
                return f"{name} {fault}"
    if method == "dpo" and has_equal_sides(row):  # its gradient is zero
        return (
            "chosen and rejected are equal, so nothing is preferred. Remove the row, or give two "
            "different answers."
        )
    score = row["score"] if method == "samples" else 0
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        return (
            f"score is {score!r}, but samples are compared by it. Give a number, as method=sample "
            "does."
        )
    return None


def read_of(row: Row, method: str) -> list[str]:
    """Return the fields of a row that are passed to the trainer.

    Fields of incomplete formats are left out: with a prompt that is null, or one next to messages
    or text, TRL would expect a completion too.
    """
    return _read_of(_present(row), method)


@functools.lru_cache  # the rows of a file have few sets of fields
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


def _role_fault(name: str, roles: list[str], method: str) -> str | None:
    """Return what is wrong with the roles, or None: an unknown role, or a wrong last one."""
    number = next((n for n, role in enumerate(roles) if role not in ROLES), None)
    if number is not None:
        role = roles[number]
        known = RENAMED.get(role.lower(), "the one that it is")
        remedy = near(role, ROLES) or f" Rename it to {known}."
        return (
            f"has the role {_quoted(role)} at place {number + 1}, but roles are "
            f"{', '.join(ROLES)}.{remedy}"
        )
    if name in ANSWERS.get(method, ()) and roles[-1] != "assistant":
        return (
            f"ends with a turn of {roles[-1]}, but the last turn must be the assistant's answer, "
            f"from which {method} learns. Remove the row, or what "
            "follows its last answer."
        )
    if name == "prompt" and method in ("sft", "dpo") and roles[-1] in ("system", "developer"):
        return (
            f"ends with a turn of {roles[-1]}, but {method} needs a prompt that ends with a turn "
            "of user or tool."
        )
    return None


def _fault(name: str, value: Any) -> str | None:
    """Return a description of a field's wrong value, or None if the value is right."""
    if name == "tools" and isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    if name == "tools":
        right = isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
    elif name in TYPES:
        right = type(value) in TYPES[name]
    elif isinstance(value, str):
        right = name != "messages"
    else:
        right = isinstance(value, list) and bool(value)
        for n, message in enumerate(value if right else ()):
            if not _is_message(message):
                return f"a list with {_quoted(message)} at place {n + 1}"
    return None if right else _quoted(value)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    if message.get("content") is None:  # another field, such as a tool call, must be set
        return any(value for name, value in message.items() if name != "role")
    return isinstance(message["content"], (str, list))


def _quoted(value: Any) -> str:
    """Return a value as JSON, as in the file, cut to QUOTED characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."
