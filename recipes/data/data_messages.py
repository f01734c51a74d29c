"""Render messages by a chat template, within limits of time and length."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from launch.core.errors import UserError
from launch.core.json_lines import MAX_ROW
from launch.core.row_formats import TEMPLATE_FIELDS
from launch.core.row_messages import Messages, Row

LONGEST_S = 2.0  # CPU time of one rendering. Large rows of real files take a tenth of it.
TOO_LONG = f"its text has more than {MAX_ROW:,} characters"


class _Environment(ImmutableSandboxedEnvironment):
    """Limit the results of `*` and `**`, as jinja2's sandbox limits `range`.

    Otherwise `'a' * 10**10` fills the memory, even while the template is compiled.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        for one, times in ((left, right), (right, left)):
            if isinstance(one, Sized) and isinstance(times, int):
                size = len(one) * times
        if size > MAX_ROW:
            raise jinja2.TemplateError(TOO_LONG)
        return super().call_binop(context, operator, left, right)


# transformers creates one for each template
chat_template_utils.ImmutableSandboxedEnvironment = _Environment


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


class _TooLong(BaseException):
    """Not an Exception, which jinja2 would handle, and fail if it has no line number."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raise TemplateError if the block uses LONGEST_S of CPU time, for example in nested loops.

    Signals interrupt only the main thread, so the time of other threads is not limited.
    """

    def stop(*_: object) -> NoReturn:
        raise _TooLong

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
    try:
        yield
    except _TooLong:
        message = f"it takes more than {LONGEST_S:g} s, perhaps in nested loops"
        raise jinja2.TemplateError(message) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


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
            with limited_time():
                # One call for all takes a quarter less time.
                texts = tokenizer.apply_chat_template(conversations, **options)
            if all(len(text) <= MAX_ROW for text in texts):
                return texts
    rendered = []
    for n, messages in enumerate(conversations):
        try:
            own = template_options(rows[n]) if rows else {}
            with limited_time():
                rendered.append(tokenizer.apply_chat_template(messages, **options, **own))
            if len(rendered[-1]) > MAX_ROW:
                raise jinja2.TemplateError(TOO_LONG)
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
