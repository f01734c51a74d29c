"""List the files of data.path under data=samples, for the ranks and for the run's record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from launch.core.errors import UserError

SCORED = "scored.jsonl"  # recipes/sample.py writes it


def files(path: str) -> list[str]:
    """Return `path` or, for a directory, every scored.jsonl below it, else every *.jsonl.

    Links are followed, because a phase may be a link to another run. Each file is listed once, by
    its real path. Raises UserError if a part of the directory cannot be read.
    """
    if not Path(path).is_dir():
        return [path]

    def reject(error: OSError) -> NoReturn:
        raise UserError(
            f"data.path={path}: {error.filename} cannot be read ({error.strerror}). Use: a "
            "directory whose files you may all read."
        )

    rows: list[Path] = []
    visited = set()
    for folder, folders, names in os.walk(path, onerror=reject, followlinks=True):
        if os.path.realpath(folder) in visited:  # a link to a parent or to an earlier folder
            folders.clear()
            continue
        visited.add(os.path.realpath(folder))
        folders.sort()
        paths = [Path(folder, name) for name in names]
        rows += [file for file in paths if file.suffix == ".jsonl"]
        for file in paths:
            # A broken link to a phase or to a file of samples loses rows. Other broken links, such
            # as a log of W&B, do not.
            if file.suffix in ("", ".jsonl") and file.is_symlink() and not file.exists():
                raise UserError(
                    f"data.path={path}: {file} is a link to {os.readlink(file)}, which is missing. "
                    "Use: a directory without this link."
                )
    scored = [file for file in rows if file.name == SCORED]
    return list(dict.fromkeys(os.path.realpath(file) for file in sorted(scored or rows)))
