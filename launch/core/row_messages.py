"""Bring the messages of rows into the form that chat templates read."""

import contextlib
import json
from collections.abc import Collection
from typing import Any

Row = dict[str, Any]
Messages = list[dict[str, Any]]
SYSTEM_ROLES = ("system", "developer")
WEIGHTS = ("train", "loss")  # true or false: Axolotl's and ms-swift's key of a turn's weight


def conform(row: Row, fields: Collection[str], sides: Collection[str]) -> Row:
    """Return a row with the messages of `fields` in one form. Values without that form stay.

    Null keys are absent, text parts are joined, and JSON text of tool calls' arguments is decoded.
    WEIGHTS become `weight`. `sides` are the fields that follow the prompt. If some of
    both are messages, all become messages, and sides that repeat the prompt lose it.
    """
    conformed = {
        name: [_message(turn) for turn in row[name]]
        for name in fields
        if isinstance(row.get(name), list)
    }
    answers = {name: conformed.get(name, row[name]) for name in sides if row.get(name) is not None}
    prompt = conformed.get("prompt", row.get("prompt"))
    values = (prompt, *answers.values())
    if answers and isinstance(prompt, (str, list)) and any(isinstance(v, list) for v in values):
        parts = {"prompt": _turns("user", prompt)}
        parts |= {name: _turns("assistant", value) for name, value in answers.items()}
        if all(isinstance(part, list) for part in parts.values()):  # else it is rejected later
            conformed |= _without_repetition(parts)
    return {**row, **conformed}


def _turns(role: str, value: Any) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _message(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    message = {key: value for key, value in turn.items() if value is not None}
    parts = message.get("content")
    if isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    ):
        message["content"] = "".join(part["text"] for part in parts)
    for flag in WEIGHTS:
        if flag in message and (is_trained := message.pop(flag)) is not True:
            message["weight"] = 0 if is_trained is False else is_trained
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: Any) -> Any:
    """Return a tool call, or its function, without null keys and with decoded arguments."""
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if "function" in call:
        return {**call, "function": _call(call["function"])}
    if isinstance(text := call.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            decoded = json.loads(text)
            call["arguments"] = decoded if isinstance(decoded, dict) else text
    return call


def _without_repetition(parts: dict[str, Any]) -> dict[str, Any]:
    """Return prompt and sides. If every side repeats the prompt, remove it from the sides.

    The system messages before it may be in the prompt, in all sides, or in both. Spaces at the
    ends of messages do not count.
    """
    split = {name: _split_system(value) for name, value in parts.items()}
    system, question = split.pop("prompt")
    systems = [before for before, _ in split.values()]
    size, stripped = len(question), _stripped(question)
    is_repeated = size and all(
        _stripped(rest[:size]) == stripped and len(rest) > size for _, rest in split.values()
    )
    if not is_repeated or any(_stripped(before) != _stripped(systems[0]) for before in systems):
        return parts
    if system and systems[0] and _stripped(system) != _stripped(systems[0]):
        return parts
    sides = {name: rest[size:] for name, (_, rest) in split.items()}
    return {"prompt": [*(system or systems[0]), *question], **sides}


def _stripped(messages: Messages) -> Messages:
    return [
        {**turn, "content": turn["content"].strip()}
        if isinstance(turn, dict) and isinstance(turn.get("content"), str)
        else turn
        for turn in messages
    ]


def _split_system(messages: Messages) -> tuple[Messages, Messages]:
    roles = [turn.get("role") if isinstance(turn, dict) else None for turn in messages]
    number = next((n for n, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    return messages[:number], messages[number:]


def without_nulls(value: Any) -> Any:
    """Return a value without null keys at any depth. Arrow adds them to make objects alike."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def message_texts(value: Any) -> list[str]:
    """Return the text of each message, or [value] for a string."""
    if isinstance(value, str):
        return [value]
    return [str(message.get("content") or "") for message in value]


def texts_with_roles(value: Any) -> list[str]:
    """Return the texts, each message's preceded by its other fields (such as `role`) as JSON."""
    if isinstance(value, str):
        return [value]
    parts = []
    for message, text in zip(value, message_texts(value), strict=True):
        rest = {key: item for key, item in message.items() if key != "content"}
        parts += [json.dumps(rest, sort_keys=True, default=str), text]
    return parts
