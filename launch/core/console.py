"""Keep programs running when nobody reads their standard streams any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO, cast

from launch.core.errors import EXIT_DONE, EXIT_HOST, os_error_text


class Unwatched:
    """A stream that discards its text once nobody reads it."""

    def __init__(self, stream: TextIO, gone: type[OSError] = OSError) -> None:
        """Wrap `stream`; `gone` is the error that means that nobody reads."""
        self.stream, self.gone = stream, gone

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except self.gone:
            drop(self.stream)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except self.gone:
            drop(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def drop(stream: TextIO) -> None:
    """Redirect a stream to nowhere, since Python would fail at exit on unflushed text."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a program and exit.

    `| head` is not an error (rich would exit with 1). A full disk behind stdout exits with 3.
    """
    out = sys.stdout  # None if the caller closed it
    if out is None:
        sys.exit(main(sys.argv[1:]))
    sys.stdout = cast(TextIO, Unwatched(out, BrokenPipeError))
    code = EXIT_DONE
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        drop(out)
        if code == EXIT_DONE:
            print(os_error_text(error, "standard output"), file=sys.stderr)
        code = code or EXIT_HOST
    sys.exit(code)
