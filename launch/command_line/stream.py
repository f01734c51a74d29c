"""Standard streams that somebody may stop reading."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO, cast

from launch.errors import EXIT_DONE, EXIT_HOST


class Unwatched:
    """A stream that people may stop reading (a closed pipe, a terminal that went away): what is written then goes nowhere."""

    def __init__(self, stream: TextIO, gone: type[OSError] = OSError) -> None:
        """`gone`: what says that nobody reads."""
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
    """Send what is still written to it nowhere; Python fails at its end otherwise, for what it could not flush."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """A program from its arguments to its exit code. `| head` is no error (rich would end with 1); a full disk behind stdout is one: 3."""
    out = sys.stdout  # None where the caller closed it
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
            print(f"{error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        code = code or EXIT_HOST
    sys.exit(code)
