"""A user's mistake, told in one message."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """What was given, which rule it breaks and what would work. The programs print it without a traceback and exit with 2."""


def near(name: str, known: Iterable[str]) -> str:
    """A sentence for an unknown `name`: the names it resembles, or all that exist where there are few."""
    known = sorted(known)
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known: {', '.join(known)}." if len(known) <= 12 else f"{len(known)} are known, none like it."
