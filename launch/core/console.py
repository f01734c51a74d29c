"""Keep programs running after the readers of their standard streams have gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, cast

from launch.core.errors import EXIT_DONE, EXIT_HOST, os_error_text

GONE = (errno.EPIPE, errno.EIO)  # of a closed pipe, of a closed terminal


class Unwatched:
    """A stream that discards text once its reader has gone; `optional` also if its disk is full."""

    def __init__(self, stream: TextIO, optional: bool) -> None:
        self.stream, self.optional = stream, optional

    def write(self, text: str) -> int:
        with self._discarding():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self.stream.flush()

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.optional and error.errno not in GONE:
                raise
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

    `| head` and a terminal that closes are not errors (rich would exit with 1). A full disk behind
    stdout exits with 3.
    """
    out = sys.stdout  # None if the caller closed it
    if sys.stderr is not None:
        sys.stderr = cast(TextIO, Unwatched(sys.stderr, optional=True))
    if out is None:
        sys.exit(main(sys.argv[1:]))
    sys.stdout = cast(TextIO, Unwatched(out, optional=False))
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
