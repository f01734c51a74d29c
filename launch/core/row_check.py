"""Check that a row has the fields that a method reads, and values that its trainer accepts."""

import functools
import json
import math
from collections.abc import Callable, Collection
from typing import Any

from launch.core.errors import UserError
from launch.core.near_names import columns_hint
from launch.core.row_formats import TEMPLATE_FIELDS, fields_problem, row_format
from launch.core.row_messages import SYSTEM_ROLES, Row, conform, texts_with_roles

# Roles of TRL's datasets, and `developer` for chat templates such as gpt-oss's.
ROLES = ("system", "developer", "user", "assistant", "tool")
# keys of other programs' messages with a weight for each part of a turn
PARTIAL_WEIGHTS = ("train_detail", "loss_scale")
MAX_DEPTH = 32  # of a value; `datasets` fails at 60
QUOTE_LENGTH = 60  # maximum characters of a value in an error message


def is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        return False
    if value.get("weight", 1) not in (0, 1):
        return False
    if value.get("content") is None:  # then another field, such as tool_calls, must be set
        return any(item for name, item in value.items() if name not in ("role", "weight"))
    return isinstance(value["content"], str)


def are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def are_tools(value: Any) -> bool:
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return False
    return isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)


def is_finite(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


MESSAGES = (
    "a non-empty list of messages {role, content}, each with text (or text parts) as content, a "
    f"weight of 0 or 1, if any, and a role of {' | '.join(ROLES)}"
)
# Field -> (check of a value, description of valid values)
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda v: type(v) is str, "text"),
    "answer": (lambda v: type(v) is str or is_finite(v), "text or a finite number"),
    "messages": (are_messages, MESSAGES),
    "tools": (are_tools, "a list of tools, each an object, or its JSON"),
    "chat_template_kwargs": (lambda v: type(v) is dict, "an object {name: value}"),
    "score": (is_finite, "a finite number"),
}
TEXT_OR_MESSAGES = (lambda v: isinstance(v, str) or are_messages(v), f"text or {MESSAGES}")


def check_row(row: Row, where: str, method: str) -> None:
    """Raise UserError if `method` cannot use a row. `where` locates the row in the message."""
    if problem := row_problem(row, method):
        raise UserError(f"{where}: {problem}")


def row_problem(row: Row, method: str) -> str | None:
    """Return what is wrong with a row and the remedy as text, or None for a valid row."""
    form = row_format(method)
    if problem := fields_problem(row, method):
        return problem
    # If a table mixes formats, the fields of a row's unused formats are null.
    complete = _complete(_present(row), method)
    if len(complete) > 1:
        fields = ", and ".join(" and ".join(sorted(form)) for form in complete)
        return (
            f"has {fields}, but {method} would read only one of them. Remove the fields that "
            "should not be learned, or use: data.columns.<field>=null."
        )
    has_unused_forms = len(form.forms) > 1 and bool(complete)
    for name in (*form.read, *form.rewards):
        may_be_null = has_unused_forms or name in (*TEMPLATE_FIELDS, *form.rewards)
        if name not in row or (may_be_null and row[name] is None):
            continue
        value, (is_valid, expected) = row[name], VALUES.get(name, TEXT_OR_MESSAGES)
        if form.learned and (problem := _partial_weight_problem(name, value)):
            return problem
        if not is_valid(value):
            items = value if isinstance(value, list) and "messages" in expected else ()
            invalid = next((item for item in items if not is_message(item)), value)
            text = json.dumps(invalid, ensure_ascii=False, default=str)  # as in the file
            return f"{name} is {text:.{QUOTE_LENGTH}}, but must be {expected}."
        if name in form.learned and (problem := _answer_problem(row, name, method)):
            return problem
    if method == "dpo" and type(row["chosen"]) is not type(row["rejected"]):
        return "chosen and rejected must both be text, or both be messages."
    if problem := _question_problem(row, method):
        return problem
    # A training table must hold these: all fields if rewards may read any. Evaluations have none.
    for name in row if form.reserved else form.read if form.learned else ():
        if problem := _value_problem(row.get(name)):
            return f"{name} contains {problem}"
    if method == "dpo" and has_equal_sides(row):  # the gradient would be zero
        return (
            "chosen and rejected are equal, so neither is better. Remove the row, or provide two "
            "different answers."
        )
    return None


def _partial_weight_problem(name: str, value: Any) -> str | None:
    """Return the message for a turn of which only parts should be learned, which TRL cannot do."""
    for turn in value if isinstance(value, list) else ():
        for key in PARTIAL_WEIGHTS if isinstance(turn, dict) else ():
            if turn.get(key):
                return (
                    f"{name} has a turn with {key}, whose parts would all be learned alike. Set "
                    f"train: true or false for the whole turn, and remove {key}."
                )
    return None


def _value_problem(value: Any, depth: int = 0) -> str | None:
    if type(value) is int and not -(2**63) <= value < 2**63:
        number = f"{str(value):.{QUOTE_LENGTH}}"
        return f'the integer {number}, which exceeds 64 bits. Write it as text: "...".'
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} nested lists or objects. Write the value as JSON text."
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        if problem := _value_problem(item, depth + 1):
            return problem
    return None


def _question_problem(row: Row, method: str) -> str | None:
    """Return why the question of a row of texts would be ignored, or learned as an answer."""
    # The model itself wrote the rows with `finished`. It may have repeated the prompt.
    if method not in ("sft", "dpo") or "finished" in row:
        return None
    prompt = row.get("prompt")
    if method == "dpo" and prompt is None and not isinstance(row["chosen"], list):
        given = [name for name, value in row.items() if value]
        if column := columns_hint(given, ("prompt",)):
            question = column.partition("=")[2]
            return f"has {question}, which dpo does not read, and no prompt. Use: {column}."
    names = [name for name in row_format(method).learned if name != "messages"]
    if isinstance(prompt, str) and all(_repeats(row.get(name), prompt.strip()) for name in names):
        return (
            f"the prompt is repeated in {' and '.join(names)}, so {method} would learn it as part "
            "of the answer. Remove it there."
        )
    return None


def _repeats(side: Any, prompt: str) -> bool:
    """Return whether an answer is text that begins with the prompt and continues after it."""
    if not isinstance(side, str) or len(prompt.split()) < 2:
        return False  # A single word may be repeated by chance: 7, 77 and 78.
    return side.strip() != prompt and side.lstrip().startswith(prompt)


def _answer_problem(row: Row, name: str, method: str) -> str | None:
    """Return why `method` cannot learn the field `name` as the answer to the row's prompt."""
    value, prompt = row[name], row.get("prompt")
    if not isinstance(value, list):
        return None
    if value[-1]["role"] != "assistant":
        return (
            f"{name} ends with a message of {value[-1]['role']}, but {method} learns from the "
            "assistant's answer, which must be last. Remove the row, or the messages after its "
            "last answer."
        )
    role = value[0]["role"]
    if name == "messages" or not isinstance(prompt, list):
        return None
    if role in SYSTEM_ROLES or role == prompt[-1]["role"] == "user":
        return (
            f"{name} begins with a message of {role}, which {method} would learn as part of the "
            f"answer. Move the messages before the answer from {name} to prompt."
        )
    return None


def trainer_fields(row: Row, method: str) -> list[str]:
    """Return only the fields that form one complete format, for the trainer.

    For example, a prompt next to messages or text would make TRL expect a completion.
    """
    return _trainer_fields(_present(row), method)


@functools.lru_cache  # few sets of fields occur in a file
def _trainer_fields(present: frozenset[str], method: str) -> list[str]:
    complete, form = _complete(present, method), row_format(method)
    incomplete = {name for fields in form.forms if fields not in complete for name in fields}
    return [name for name in form.read if name in present and name not in incomplete]


def _present(row: Row) -> frozenset[str]:
    """Return the fields whose value is not null."""
    return frozenset([name for name, value in row.items() if value is not None])


@functools.lru_cache
def _complete(present: frozenset[str], method: str) -> list[tuple[str, ...]]:
    return [fields for fields in row_format(method).forms if present.issuperset(fields)]


def has_equal_sides(row: Row) -> bool:
    """Return whether chosen and rejected are equal once stripped, as chat templates strip them."""
    values = [row[name] for name in ("chosen", "rejected") if row.get(name) is not None]
    sides = [[text.strip() for text in texts_with_roles(value)] for value in values]
    return len(sides) == 2 and sides[0] == sides[1]


def conformed(row: Row, method: str) -> Row:
    form = row_format(method)
    return conform(row, form.read, [name for name in form.learned if name != "messages"])


def form_of(row: Row, method: str) -> str:
    """Describe the trainer's fields of a row, such as `prompt (text) and completion (text)`."""
    names = []
    for name in trainer_fields(row, method):
        if not isinstance(row[name], (str, list)):
            names.append(name)
        elif name != "tools":  # optional in each row
            names.append(f"{name} ({'text' if isinstance(row[name], str) else 'messages'})")
    return " and ".join(names)


def check_forms(forms: Collection[str], where: str, method: str) -> None:
    """Raise UserError for several forms, since a trainer assumes the first row's form for all."""
    if len(forms) > 1:
        raise UserError(
            f"{where}: some rows have {', others '.join(sorted(forms))}. Give all rows of "
            f"{method} the same fields, all of them text or all messages."
        )
