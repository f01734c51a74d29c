"""Render messages by a chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from launch.core.errors import UserError
from launch.core.row_formats import TEMPLATE_FIELDS
from launch.core.row_messages import Messages, Row


class RowError(UserError):
    """A row cannot be used. `messages` are those of the row, so that its line can be found."""

    def __init__(self, messages: Any, problem: str) -> None:
        super().__init__(messages, problem)  # all arguments, because workers pickle exceptions
        self.messages, self.problem = messages, problem

    def __str__(self) -> str:
        return self.problem


def template_options(row: Row) -> dict[str, Any]:
    """Return a row's arguments for the chat template, except the messages."""
    tools = row.get("tools")
    return {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    rows: Sequence[Row] = (),
    singly: bool = False,
    **options: Any,
) -> list[Any]:
    """Return what the chat template makes of each list of messages, with its row's arguments.

    Raises RowError with the template's own words for the first that it cannot render.
    """
    if not singly and not any(
        row.get(name) is not None for row in rows for name in TEMPLATE_FIELDS
    ):
        with contextlib.suppress(Exception):  # raised again below, where the row is known
            # One call for all takes a quarter less time.
            return tokenizer.apply_chat_template(conversations, **options)
    rendered = []
    for n, messages in enumerate(conversations):
        try:
            own = template_options(rows[n]) if rows else {}
            rendered.append(tokenizer.apply_chat_template(messages, **options, **own))
        except Exception as error:  # a template can raise anything, such as a TypeError
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            words = " ".join(f"{kind}{error}".split()).rstrip(".")
            raise RowError(
                messages,
                f"the chat template cannot render these messages: {words}. Use: "
                "data.chat_template=<file.jinja>, the model's instruct version, or plain text. Or "
                "remove the row.",
            ) from error
    return rendered
