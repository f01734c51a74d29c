"""A log of its own for each of several ranks: in one that they share, nobody sees which of them said what."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def redirect(argv: list[str], environ: Mapping[str, str]) -> None:
    """Point descriptors 1 and 2 of one of several ranks at logs/rank<RANK>.log beside its `--config`; of anything else, nothing.

    Descriptors, which native libraries (RCCL, ROCr), faulthandler and child processes write to as well; and a file, no pipe: a rank that
    is killed leaves every line it wrote. Raises OSError.
    """
    if int(environ.get("WORLD_SIZE", "1")) == 1 or "--config" not in argv[:-1]:
        return
    logs = Path(argv[argv.index("--config") + 1]).parent / "logs"
    logs.mkdir(exist_ok=True)
    log = os.open(logs / f"rank{environ['RANK']}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
