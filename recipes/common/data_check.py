"""Whether a row of one's own has the fields that a method reads, with values that its trainer can take."""

from __future__ import annotations

import json
from typing import Any

from recipes.common.data_select import TEMPLATE_FIELDS, Row, check_pair, check_sample
from recipes.common.errors import UserError, near

# Method -> the sets of fields of which a row needs one (TRL's dataset formats).
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
REWARDS_READ = {"grpo": ("answer",)}  # where a row has it: an evaluation of the same rows needs it
MESSAGES = "a list of one or more messages {role, content}"
EXPECTED = {
    "text": "text",
    "answer": "text or a number",
    "messages": MESSAGES,
    "tools": "a list of tools, each an object, or its JSON",
    "chat_template_kwargs": "an object {name: value}",
}
# Those of TRL's data sets, and developer, which templates such as gpt-oss's take beside system.
ROLES = ("system", "developer", "user", "assistant", "tool")
RENAMED = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatbot": "assistant", "model": "assistant", "ai": "assistant"}
RENAMED |= {"function": "tool", "ipython": "tool", "function_call": "assistant", "observation": "tool"}
ANSWERS = {"sft": ("messages", "completion"), "dpo": ("chosen", "rejected"), "samples": ("completion",)}  # that end in what is learned
# Fields of other programs' rows -> what makes TRL's of them. launch/files/data_files.py says it of a file's first row.
RENAMINGS = {
    ("conversations",): "rename conversations to messages, in its turns from to role (human: user, gpt: assistant), value to content",
    ("instruction", "output"): "join instruction and input as prompt, and rename output to completion (sft) or answer (grpo, evaluate)",
}
QUOTED = 60  # characters of a value, in an error


def check_row(row: Row, where: str, method: str) -> None:
    """Raises UserError, with `where` before it, for a field that is missing, or that holds what `method` cannot read."""
    forms = FORMATS[method]
    if not any(form <= row.keys() for form in forms):
        needed = ", or ".join(" and ".join(sorted(form)) for form in forms)
        raise UserError(f"{where}: has the fields {', '.join(sorted(row)) or '(none)'}, and {method} needs {needed}.{_renaming(row)}")
    # A table has null in the fields of the forms that a row does not have.
    complete = _complete(row, method)
    if len(complete) > 1:
        given = ", and ".join(" and ".join(sorted(form)) for form in complete)
        raise UserError(f"{where}: has {given}, and {method} would read one of them. Remove the fields that are not to be learned.")
    other_forms = len(forms) > 1 and bool(complete)
    optional = (*TEMPLATE_FIELDS, *REWARDS_READ.get(method, ()))
    for name in (*READ[method], *REWARDS_READ.get(method, ())):
        if name in row and not ((other_forms or name in optional) and row[name] is None):
            fault = _fault(name, row[name])
            if fault:
                raise UserError(f"{where}: {name} is {fault}, and it must be {EXPECTED.get(name, f'text or {MESSAGES}')}.")
            if isinstance(row[name], list) and name not in TEMPLATE_FIELDS:
                _check_roles(name, [message["role"] for message in row[name]], where, method)
    if method == "dpo":
        check_pair(row, where)
    if method == "samples":
        check_sample(row, where)


def read_of(row: Row, method: str) -> list[str]:
    """The fields that a trainer is given of a row. TRL would take a null prompt, or one beside messages or text, for a completion's."""
    complete = _complete(row, method)
    aside = {name for form in FORMATS[method] if form not in complete for name in form}
    return [name for name in READ[method] if row.get(name) is not None and name not in aside]


def _complete(row: Row, method: str) -> list[set[str]]:
    """The forms whose fields all have a value."""
    given = {name for name, value in row.items() if value is not None}
    return [form for form in FORMATS[method] if form <= given]


def _renaming(row: Row) -> str:
    """What makes rows of two common forms into TRL's."""
    return next((f" Use: {how}." for names, how in RENAMINGS.items() if row.keys() >= set(names)), "")


def _check_roles(name: str, roles: list[str], where: str, method: str) -> None:
    """Raises UserError for a role that chat templates do not know, which many write as it is, and for an end that leaves no answer."""
    number = next((n for n, role in enumerate(roles) if role not in ROLES), None)
    if number is not None:
        role = roles[number]
        meant = near(role, ROLES)  # all of them where none is like it
        instead = meant if meant.startswith("Did") else f"Rename it to {RENAMED.get(role.lower(), 'the one that it is')}."
        raise UserError(f"{where}: {name} has the role {_quoted(role)} at place {number + 1}, and roles are {', '.join(ROLES)}. {instead}")
    if name in ANSWERS.get(method, ()) and roles[-1] != "assistant":
        raise UserError(
            f"{where}: {name} ends with a turn of {roles[-1]}, and its last turn must be the assistant's: that is the answer that {method} "
            "learns from. Remove the row, or what stands after its last answer."
        )
    if name == "prompt" and method in ("sft", "dpo") and roles[-1] in ("system", "developer"):
        raise UserError(f"{where}: prompt ends with a turn of {roles[-1]}, and {method} needs one that ends with a turn of user or tool.")


def _fault(name: str, value: Any) -> str | None:
    """What a field is in place of what it must be; None where it is right."""
    if name == "answer":
        return None if isinstance(value, (str, int, float)) and not isinstance(value, bool) else _quoted(value)
    if name in TEMPLATE_FIELDS:
        return None if (_are_tools(value) if name == "tools" else isinstance(value, dict)) else _quoted(value)
    if isinstance(value, str):
        return _quoted(value) if name == "messages" else None
    if name == "text" or not isinstance(value, list) or not value:
        return _quoted(value)
    number = next((n for n, message in enumerate(value) if not _is_message(message)), None)
    return None if number is None else f"a list with {_quoted(value[number])} at place {number + 1}"


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    if message.get("content") is None:  # then there is something else to write, such as a call of a tool
        return any(value for name, value in message.items() if name != "role")
    return isinstance(message["content"], (str, list))


def _are_tools(value: Any) -> bool:
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return False
    return isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)


def _quoted(value: Any) -> str:
    """As JSON spells it: a file has it so."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."
