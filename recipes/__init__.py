"""The programs that ranks execute, one per method.

Each program reads a resolved `config.yaml` and writes into its run directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def redirect(argv: list[str], environ: Mapping[str, str]) -> None:
    """Write output to logs/rank<RANK>.log next to `--config`, if there are several ranks.

    Redirect the file descriptors, because native libraries (RCCL, ROCr), faulthandler and child
    processes write to them. A pipe could lose the last lines of a killed rank. Raises OSError.
    """
    if int(environ.get("WORLD_SIZE", "1")) == 1 or "--config" not in argv[:-1]:
        return
    logs = Path(argv[argv.index("--config") + 1]).parent / "logs"
    logs.mkdir(exist_ok=True)
    log = os.open(
        logs / f"rank{environ['RANK']}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


# `python -m recipes.<method>` runs this before it imports libraries, whose output is logged too.
redirect(sys.argv, os.environ)
