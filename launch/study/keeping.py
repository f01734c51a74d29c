"""Find the first phases of an earlier pipeline that are unchanged and need not run again.

The earlier run stays whole. The new one links to each phase that it keeps, and later phases take
their models from there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.config.identity import composition_hash, identity, identity_of, recorded_hash
from launch.core import json_files
from launch.inputs import sample_files
from launch.inputs.paths import real_folder
from launch.plan import rundir, sealed
from launch.plan.views import outside
from launch.schema import Config
from launch.schema.plan import Plan
from launch.study import cycles

MOST_NAMED = 3  # differences that a line lists; it counts the others


@dataclass(frozen=True)
class Reuse:
    """The phases to keep of the pipeline in `source`.

    `folders` maps a phase to its directory, which is in another run if `source` kept it too.
    `ended_by` says why the next phase runs again; it is empty if all are kept.
    """

    source: Path
    folders: dict[str, Path]
    ended_by: list[str]


def find(
    config: Config, home: Path, plans: dict[str, Plan], planned: Callable[..., dict[str, Plan]]
) -> Reuse | None:
    """Return the phases to keep of the most similar pipeline in `home`; of equals, the newest.

    `plans` keep nothing; `planned(kept)` makes plans that do. Return None if there is no earlier
    pipeline. Also return None if all of this one is done, since like any run it then runs again.
    """
    best: Reuse | None = None
    fault_once = functools.cache(fault)  # several runs may keep the same phase
    for source in sorted(home.glob("*/"), reverse=True):
        record = json_files.read_json(source / "record.json") or {}
        if "phases" not in record or sealed.faults(record):
            continue
        reuse, before = _leading(source, record["phases"], plans, fault_once), None
        # Kept evaluations choose the cycle of a RAFT, and so the models of later phases.
        while reuse.folders != before and any(plan.chosen for plan in plans.values()):
            before = reuse.folders
            reuse = _leading(source, record["phases"], planned(before), fault_once)
        if not reuse.ended_by and recorded_hash(record) == composition_hash(config):
            return None
        if best is None or len(reuse.folders) > len(best.folders):
            best = reuse
    return best


def _leading(
    source: Path,
    phases: dict[str, str],
    plans: dict[str, Plan],
    fault_once: Callable[[Path], str | None],
) -> Reuse:
    """Return the recorded phases of `source` that can stand in for the first of `plans`."""
    folders: dict[str, Path] = {}
    moved: dict[str, str] = {}  # kept directory -> its directory in `plans`
    names = iter(phases.items())
    for name, plan in plans.items():
        if plan.is_left_out:
            continue
        old_name, old_folder = next(names, ("", ""))
        folder = real_folder(source / old_folder)
        if not old_name:
            changes = [f"{name}: it is new"]
        elif (old_name, old_folder) != (name, plan.run_dir.name):
            changes = [f"{name}: {old_folder} was in its place"]
        elif why := fault_once(folder):
            changes = [f"{name}: {why}"]
        else:
            record = json_files.read_json(folder / "record.json") or {}
            old = _moved(identity(record["composition"]), moved)
            changes = rundir.differences(old, identity_of(plan.config), name)
        if changes:
            return Reuse(source, folders, changes)
        folders[name], moved[str(folder)] = folder, str(plan.run_dir)
    return Reuse(source, folders, [])


def _moved(content: Any, places: dict[str, str]) -> Any:
    """Return `content` with paths that are keys of `places` replaced by the values."""
    if isinstance(content, dict):
        return {key: _moved(value, places) for key, value in content.items()}
    if isinstance(content, list):
        return [_moved(value, places) for value in content]
    for old, new in places.items() if isinstance(content, str) else ():
        if content == old or content.startswith(f"{old}/"):
            return new + content.removeprefix(old)
    return content


def fault(folder: Path) -> str | None:
    """Return why the phase in `folder` cannot be kept; None if it can."""
    record = json_files.read_json(folder / "record.json")
    if record is None:
        return f"there is no record of it in {folder}"
    if faults := sealed.faults(record):
        return f"{folder / 'record.json'} cannot be trusted ({faults[0]})"
    if record["status"] != "done":
        return f"it is not finished in {folder}"
    is_sampling = record["composition"]["method"]["name"] == "sample"
    samples = (cycles.SELECTED, sample_files.SCORED) if is_sampling else ()
    for name in ("result.json", *samples, *record["outputs"]):
        if not (folder / name).is_file():
            return f"{folder / name} is gone"
    changed = rundir.changed_data(record)
    return f"{changed[0]} has changed" if changed else None


def summary(reuse: Reuse) -> str:
    """Return a line that names the kept phases and their run, and says why no more are kept."""
    names = ", ".join(folder.name for folder in reuse.folders.values())
    more = len(reuse.ended_by) - MOST_NAMED
    why = "; ".join(reuse.ended_by[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
    if not names:
        return f"Keeps nothing of {reuse.source}: {why}."
    rest = f"runs what comes after: {why}" if why else "nothing is left to run"
    return f"Keeps {names} of {reuse.source}; {rest}. resume=never keeps nothing."


def link(run_dir: Path, plans: dict[str, Plan]) -> None:
    """Link to each kept phase, relatively, so that both runs can be moved."""
    for folder in outside(run_dir, plans).values():
        here = run_dir / folder.name
        if not here.is_symlink():
            here.symlink_to(os.path.relpath(folder, run_dir))
