"""Reuse the first phases of an earlier pipeline, up to the first one that has changed.

The earlier run is not modified. The new run links to each reused phase, and its later phases load
models through these links.
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
from launch.plan.views import reused_phases
from launch.schema import Config
from launch.schema.plan import Plan
from launch.study import cycles

MAX_CHANGES = 3  # differences that the summary lists; it only counts the others


@dataclass(frozen=True)
class Reuse:
    """The phases to reuse from the pipeline in `source`.

    `folders` maps a phase to its directory, which is in another run if `source` reused it too.
    `changes` lists why the next phase has to run. It is empty if all phases are reused.
    """

    source: Path
    folders: dict[str, Path]
    changes: list[str]


def find(
    config: Config, home: Path, plans: dict[str, Plan], make_plans: Callable[..., dict[str, Plan]]
) -> Reuse | None:
    """Return the phases to reuse from the pipeline in `home` with the most of them.

    If several tie, choose the newest. `plans` reuse nothing; `make_plans(folders)` returns plans
    that reuse `folders`. Return None if there is no earlier pipeline, or if this pipeline is done,
    because a finished run starts again.
    """
    best: Reuse | None = None
    cached_problem = functools.cache(problem)  # several runs may contain the same phase
    for source in rundir.run_dirs(home):
        record = json_files.read_json(source / "record.json") or {}
        if "phases" not in record or sealed.problems(record):
            continue
        reuse, before = _leading(source, record["phases"], plans, cached_problem), None
        # Reused evaluations may change the cycle that RAFT chooses, and therefore later phases.
        while reuse.folders != before and any(plan.chosen for plan in plans.values()):
            before = reuse.folders
            reuse = _leading(source, record["phases"], make_plans(before), cached_problem)
        if not reuse.changes and recorded_hash(record) == composition_hash(config):
            return None
        if best is None or len(reuse.folders) > len(best.folders):
            best = reuse
    return best


def _leading(
    source: Path,
    phases: dict[str, str],
    plans: dict[str, Plan],
    cached_problem: Callable[[Path], str | None],
) -> Reuse:
    """Return the phases of `source` that can replace the first phases of `plans`."""
    folders: dict[str, Path] = {}
    new_paths: dict[str, str] = {}  # reused directory -> its directory in `plans`
    names = iter(phases.items())
    for name, plan in plans.items():
        if plan.is_left_out:
            continue
        old_name, old_folder = next(names, ("", ""))
        folder = real_folder(source / old_folder)
        if not old_name:
            changes = [f"{name} is new"]
        elif (old_name, old_folder) != (name, plan.run_dir.name):
            changes = [f"{name} replaces {old_folder}"]
        elif why := cached_problem(folder):
            changes = [f"{name}: {why}"]
        else:
            record = json_files.read_json(folder / "record.json") or {}
            old = _replace_paths(identity(record["composition"]), new_paths)
            changes = rundir.differences(old, identity_of(plan.config), name)
        if changes:
            return Reuse(source, folders, changes)
        folders[name], new_paths[str(folder)] = folder, str(plan.run_dir)
    return Reuse(source, folders, [])


def _replace_paths(content: Any, paths: dict[str, str]) -> Any:
    """Return `content` with each path that is a key of `paths` replaced by its value."""
    if isinstance(content, dict):
        return {key: _replace_paths(value, paths) for key, value in content.items()}
    if isinstance(content, list):
        return [_replace_paths(value, paths) for value in content]
    for old, new in paths.items() if isinstance(content, str) else ():
        if content == old or content.startswith(f"{old}/"):
            return new + content.removeprefix(old)
    return content


def problem(folder: Path) -> str | None:
    """Return why the phase in `folder` cannot be reused; None if it can."""
    record = json_files.read_json(folder / "record.json")
    if record is None:
        return f"{folder} has no record.json"
    if problems := sealed.problems(record):
        return f"{folder / 'record.json'} cannot be trusted ({problems[0]})"
    if record["status"] != "done":
        return f"{folder} is not finished"
    is_sampling = record["composition"]["method"]["name"] == "sample"
    samples = (cycles.SELECTED, sample_files.SCORED) if is_sampling else ()
    for name in ("result.json", *samples, *record["outputs"]):
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
    changed = rundir.changed_data(record)
    return f"{changed[0]} has changed" if changed else None


def summary(reuse: Reuse) -> str:
    """Return a line with the reused phases, their run, and why later phases are not reused."""
    names = ", ".join(folder.name for folder in reuse.folders.values())
    more = len(reuse.changes) - MAX_CHANGES
    why = "; ".join(reuse.changes[:MAX_CHANGES]) + (f"; and {more} more" if more > 0 else "")
    if not names:
        return f"Reusing no phase of {reuse.source}: {why}."
    rest = f"running the phases after them: {why}" if why else "no other phase has to run"
    return f"Reusing {names} of {reuse.source}; {rest}. resume=never reuses nothing."


def link(run_dir: Path, plans: dict[str, Plan]) -> None:
    """Create a link to each reused phase. It is relative, so that both runs can be moved."""
    for folder in reused_phases(run_dir, plans).values():
        path = run_dir / folder.name
        if not path.is_symlink():
            path.symlink_to(os.path.relpath(folder, run_dir))
