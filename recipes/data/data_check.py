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
# Fields for rewards: optional in training, but needed to evaluate the same rows.
REWARDS_READ = {"grpo": ("answer",)}
# Fields whose last message must be the assistant's answer, which the method learns.
ANSWERS = {
    "sft": ("messages", "completion"),
    "dpo": ("chosen", "rejected"),
    "samples": ("completion",),
}
# Roles of TRL's datasets, and `developer` for chat templates such as gpt-oss's.
ROLES = ("system", "developer", "user", "assistant", "tool")
QUOTE_LENGTH = 60  # maximum characters of a value in an error message


def is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        return False
    if value.get("content") is None:  # then another field, such as tool_calls, must be set
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


def has_type(*types: type) -> Callable[[Any], bool]:
    """Return a check for exact types. isinstance would accept true as an integer."""
    return lambda value: type(value) in types


MESSAGES = f"a non-empty list of messages {{role, content}} with roles {' | '.join(ROLES)}"
# Field -> (check of a value, description of valid values)
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (has_type(str), "text"),
    "answer": (has_type(str, int, float), "text or a number"),
    "messages": (are_messages, MESSAGES),
    "tools": (are_tools, "a list of tools, each an object, or its JSON"),
    "chat_template_kwargs": (has_type(dict), "an object {name: value}"),
    "score": (lambda v: type(v) in (int, float) and math.isfinite(v), "a finite number"),
}
TEXT_OR_MESSAGES = (lambda v: isinstance(v, str) or are_messages(v), f"text or {MESSAGES}")


def check_row(row: Row, where: str, method: str) -> None:
    """Raise UserError if `method` cannot use a row. `where` locates the row in the message."""
    if problem := row_problem(row, method):
        raise UserError(f"{where}: {problem}")


def row_problem(row: Row, method: str) -> str | None:
    """Return what is wrong with a row and the remedy as text, or None for a valid row."""
    forms = FORMATS[method]
    if not any(form <= row.keys() for form in forms):
        needed = ", or ".join(" and ".join(sorted(form)) for form in forms)
        remedy = field_hint(row.keys())
        return (
            f"has the fields {', '.join(sorted(row)) or '(none)'}, but {method} needs "
            f"{needed}.{f' Use: {remedy}.' if remedy else ''}"
        )
    # If a table mixes formats, the fields of a row's unused formats are null.
    complete = _complete(_present(row), method)
    if len(complete) > 1:
        fields = ", and ".join(" and ".join(sorted(form)) for form in complete)
        return (
            f"has {fields}, but {method} would read only one of them. Remove the fields that "
            "should not be learned."
        )
    has_unused_forms = len(forms) > 1 and bool(complete)
    rewards = REWARDS_READ.get(method, ())
    for name in (*READ[method], *rewards):
        may_be_null = has_unused_forms or name in (*TEMPLATE_FIELDS, *rewards)
        if name not in row or (may_be_null and row[name] is None):
            continue
        value, (is_valid, expected) = row[name], VALUES.get(name, TEXT_OR_MESSAGES)
        if not is_valid(value):
            items = value if isinstance(value, list) and "messages" in expected else ()
            invalid = next((item for item in items if not is_message(item)), value)
            text = json.dumps(invalid, ensure_ascii=False, default=str)  # as in the file
            return f"{name} is {text:.{QUOTE_LENGTH}}, but must be {expected}."
        is_learned = name in ANSWERS.get(method, ())
        if is_learned and isinstance(value, list) and value[-1]["role"] != "assistant":
            return (
                f"{name} ends with a message of {value[-1]['role']}, but {method} learns from the "
                "assistant's answer, which must be last. Remove the row, or the messages after its "
                "last answer."
            )
    if method == "dpo" and has_equal_sides(row):  # the gradient would be zero
        return (
            "chosen and rejected are equal, so neither is better. Remove the row, or provide two "
            "different answers."
        )
    return None


def trainer_fields(row: Row, method: str) -> list[str]:
    """Return only the fields that form one complete format, for the trainer.

    For example, a prompt next to messages or text would make TRL expect a completion.
    """
    return _trainer_fields(_present(row), method)


@functools.lru_cache  # few sets of fields occur in a file
def _trainer_fields(present: frozenset[str], method: str) -> list[str]:
    complete = _complete(present, method)
    incomplete = {name for form in FORMATS[method] if form not in complete for name in form}
    return [name for name in READ[method] if name in present and name not in incomplete]


def _present(row: Row) -> frozenset[str]:
    """Return the fields whose value is not null."""
    return frozenset([name for name, value in row.items() if value is not None])


@functools.lru_cache
def _complete(present: frozenset[str], method: str) -> list[set[str]]:
    return [form for form in FORMATS[method] if form <= present]
