"""The errors a person meets: one message (value, rule, remedy, near names), an exit code, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_USER = 2
EXIT_HOST = 3
EXIT_FAILED = 4
EXIT_HUNG = 5
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: run it again to resume


class UserError(Exception):
    """The configuration is wrong."""

    exit_code = EXIT_USER


class HostError(Exception):
    """The configuration is right, and this host cannot run it."""

    exit_code = EXIT_HOST


def near(name: str, options: Iterable[str]) -> str:
    """' Did you mean a, b?' or '' when nothing is near."""
    options = sorted(set(options))
    found = difflib.get_close_matches(name, options, n=3, cutoff=0.5) or [o for o in options if name and o.startswith(name)][:3]
    return f" Did you mean {', '.join(found)}?" if found else ""
