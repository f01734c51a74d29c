"""Find misspelled variables of RCCL (NCCL), which the library would ignore."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from launch.core.errors import UserError

# Similarity of a misspelling, above that of NCCL_IBEXT_DISABLE, which a plugin reads.
TYPO = 0.92


def check_variables(names: Iterable[str], key: str, libraries: Iterable[str] | None = None) -> None:
    """Raise UserError for a variable that is almost, but not quite, one of the loaded (R)CCL's.

    Plugins read others. A CPU build of torch loads no library.
    """
    if libraries is None:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        libraries = {*re.findall(r"/\S*/lib[nr]ccl\.so\S*", maps)}
    known = set[str]()
    for library in libraries:  # of 500 MB, so a pattern must begin with literal bytes to be fast
        content = Path(library).read_bytes()
        for pattern in (rb"NCCL_[A-Z0-9_]+(?=\0)", rb"RCCL_[A-Z0-9_]+(?=\0)"):
            known |= {name.decode() for name in re.findall(pattern, content)}
    for name in names:
        close = difflib.get_close_matches(name, known, 1, cutoff=TYPO)
        if name.startswith(("NCCL_", "RCCL_")) and name not in known and close:
            raise UserError(f"{key}.{name}: RCCL reads no such variable. Did you mean {close[0]}?")
