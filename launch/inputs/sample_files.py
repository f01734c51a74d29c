"""List the files of data.path under data=samples.

Ranks get the list, so that a record names the files that they read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from launch.core.errors import UserError

SCORED = "scored.jsonl"  # written by recipes/sample.py for trainings


def files(path: str) -> list[str]:
    """Return `path` or, for a directory, every scored.jsonl below it, else every *.jsonl.

    Links are followed, as for a pipeline's kept phases, and each file is listed once, by its real
    path. Raises UserError if a part of the directory cannot be read.
    """
    if not Path(path).is_dir():
        return [path]

    def refuse(error: OSError) -> NoReturn:
        raise UserError(
            f"data.path={path}: {error.filename} cannot be read ({error.strerror}). Use: a "
            "directory that you can read completely."
        )

    rows: list[Path] = []
    seen = set()
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        if os.path.realpath(folder) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders.sort()
        here = [Path(folder, name) for name in names]
        rows += [file for file in here if file.suffix == ".jsonl"]
        for file in here:
            # A missing kept phase or sample file loses rows. Other broken links, such as a log of
            # W&B's, do not.
            if file.suffix in ("", ".jsonl") and file.is_symlink() and not file.exists():
                raise UserError(
                    f"data.path={path}: {file} leads to {os.readlink(file)}, which is missing. "
                    "Use: one without the link."
                )
    scored = [file for file in rows if file.name == SCORED]
    return list(dict.fromkeys(os.path.realpath(file) for file in sorted(scored or rows)))
