"""The files of data.path under data=samples. Ranks are handed the list and look for none, so that a record names what they read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from launch.errors import UserError
from launch.pipelines.cycles import SCORED


def files(path: str) -> list[str]:
    """`path`; of a directory every scored.jsonl below it, which runs of method=sample leave, or where there is none every *.jsonl.

    Links are followed, as those of a pipeline's phases that were kept, and each file is listed once, by where it really lies. Raises
    UserError where a part of the directory cannot be read.
    """
    if not Path(path).is_dir():
        return [path]

    def refuse(error: OSError) -> NoReturn:
        raise UserError(
            f"data.path={path}: {error.filename} cannot be read ({error.strerror}). Use: a directory that is all yours to read."
        )

    found: list[Path] = []
    seen = set()
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        if os.path.realpath(folder) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders.sort()
        here = [Path(folder, name) for name in names]
        found += [file for file in here if file.suffix == ".jsonl"]
        # A phase that was kept, or a file of samples; a lost log, as W&B's, loses none.
        lost = next((file for file in here if file.is_symlink() and not file.exists() and file.suffix in ("", ".jsonl")), None)
        if lost is not None:
            raise UserError(f"data.path={path}: {lost} leads to {os.readlink(lost)}, which is not there. Use: one without the link.")
    scored = [file for file in found if file.name == SCORED]
    return list(dict.fromkeys(os.path.realpath(file) for file in sorted(scored or found)))
