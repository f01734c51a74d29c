"""Keep a program running after its terminal or pipe has closed."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, cast

from launch.core import stop_signals
from launch.core.errors import EXIT_DONE, EXIT_HOST, EXIT_INTERRUPTED, os_error_text

CLOSED = (errno.EPIPE, errno.EIO)  # errors of a closed pipe and of a closed terminal


class TolerantStream:
    """A stream that discards text after its reader closed; if `optional`, after any write error."""

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
            if not self.optional and error.errno not in CLOSED:
                raise
            redirect_to_null(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def redirect_to_null(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, because Python would fail at exit on unflushed text."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """Call `main` with the command line and exit with its code.

    `| head` and a closed terminal are not errors, although rich would exit with 1. If the disk
    behind stdout is full, exit with 3.
    """
    stop_signals.is_importing = False
    out = sys.stdout  # None if the caller closed it
    if sys.stderr is not None:
        sys.stderr = cast(TextIO, TolerantStream(sys.stderr, optional=True))
    if out is None:
        sys.exit(main(sys.argv[1:]))
    sys.stdout = cast(TextIO, TolerantStream(out, optional=False))
    code = EXIT_DONE
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        redirect_to_null(out)
        if code == EXIT_DONE:
            print(os_error_text(error, "standard output"), file=sys.stderr)
        code = code or EXIT_HOST
    except Exception:  # libraries replace the exception of a stop signal by theirs
        if not stop_signals.is_exiting:
            raise
    sys.exit(EXIT_INTERRUPTED if stop_signals.is_exiting else code)
