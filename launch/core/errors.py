"""Define the exit codes, and errors that users see as one message without a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_USER = 2
EXIT_HOST = 3
EXIT_FAILED = 4
EXIT_HUNG = 5
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: rerun the command to resume

MORE_SPACE = "Free space there and repeat the command, or use run_root=<directory on a larger disk>"
REMEDIES = {
    errno.ENOSPC: MORE_SPACE,
    errno.EDQUOT: MORE_SPACE,
    errno.EFBIG: "Use `ulimit -f unlimited` before the command",
}


class UserError(Exception):
    """The configuration is wrong."""

    exit_code = EXIT_USER


class HostError(Exception):
    """The configuration is right, but this host cannot run it."""

    exit_code = EXIT_HOST


def os_error_text(error: OSError, default_path: str = "this machine") -> str:
    """Return the path and the reason of an OSError; `default_path` replaces a missing path."""
    path = error.filename2 or error.filename or default_path  # filename2: the target of a rename
    remedy = REMEDIES.get(error.errno or 0)
    return f"{path}: {error.strerror or error}" + (f". {remedy}." if remedy else "")


def near(name: str, options: Iterable[str]) -> str:
    """Return ' Did you mean a, b?', or '' if no option resembles `name`."""
    import difflib  # its import takes a tenth of the time before stop signals are handled

    options = sorted(set(options))
    names = difflib.get_close_matches(name, options, n=3, cutoff=0.5) or [
        option for option in options if name and option.startswith(name)
    ]
    return f" Did you mean {', '.join(names[:3])}?" if names else ""


def near_or_all(name: str, options: Iterable[str]) -> str:
    """Return the hint of near(). If no option is similar, list all, provided there are few."""
    options = sorted(set(options))
    known = f" Known: {', '.join(options)}." if len(options) <= 12 else ""
    return near(name, options) or known
