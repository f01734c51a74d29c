"""Run what each rank computes: one program per method.

Each reads one resolved `config.yaml` and writes into its run directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def redirect(argv: list[str], environ: Mapping[str, str]) -> None:
    """Point descriptors 1 and 2 of one of several ranks at logs/rank<RANK>.log next to `--config`.

    Redirect descriptors, because native libraries (RCCL, ROCr), faulthandler and child processes
    write to them. Use a file rather than a pipe, so that no line of a killed rank is lost. Raises
    OSError.
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


# `python -m recipes.<method>` runs this first, so the log also has the output of library imports.
redirect(sys.argv, os.environ)
