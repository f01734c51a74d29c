"""What a pipeline need not run again: the leading phases of an earlier run of its name that are done, and that nothing has changed for.

The earlier run stays whole. The new one has a link in place of each phase that it keeps, and later phases take their models from there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.files import rundir, sealed
from launch.files.paths import followed
from launch.pipelines import cycles
from launch.plan import Plan, composition_hash, identity, identity_of, outside
from launch.schema import Config

MOST_SAID = 3  # differences that are named; the others are counted


@dataclass(frozen=True)
class Kept:
    source: Path  # the run directory of the earlier pipeline
    folders: dict[str, Path]  # phase -> where it lies, which is another run still where `source` kept it too
    ended_by: list[str]  # why the first phase after them runs anew; empty where all are kept


def find(config: Config, home: Path, plans: dict[str, Plan], planned: Callable[..., dict[str, Plan]]) -> Kept | None:
    """Of the pipelines in `home` the one of which most can be kept, and of equal ones the newest; None where there is no pipeline.

    `plans` are those with nothing kept; `planned(kept=...)` makes them with phases that are. None too where all of this very pipeline is
    done: the same command then runs it again, as it does any run.
    """
    best: Kept | None = None
    lacking = functools.cache(lacks)  # runs that keep the same phases are several
    for folder in sorted(home.glob("*/"), reverse=True) if home.is_dir() else []:
        recorded = rundir.read_json(folder / "record.json") or {}
        if "phases" not in recorded or sealed.faults(recorded):
            continue
        found, before = _leading(folder, recorded["phases"], plans, lacking), None
        # The evaluations that are kept say which cycle of a RAFT is its result, and so what later phases take.
        while found.folders != before and any(plan.chosen for plan in plans.values()):
            found, before = _leading(folder, recorded["phases"], planned(kept=found.folders), lacking), found.folders
        if not found.ended_by and recorded["composition_hash"] == composition_hash(config):
            return None
        if best is None or len(found.folders) > len(best.folders):
            best = found
    return best


def _leading(source: Path, phases: dict[str, str], plans: dict[str, Plan], lacking: Callable[[Path], str | None]) -> Kept:
    """What of `source`, whose record has `phases`, can be kept in place of the first of `plans`."""
    folders: dict[str, Path] = {}
    places: dict[str, str] = {}  # of phases that are kept -> where `plans` have them
    then = list(phases.items())
    to_run = [(name, plan) for name, plan in plans.items() if not plan.is_left_out]
    for number, (name, plan) in enumerate(to_run):
        if number == len(then):
            return Kept(source, folders, [f"{name}: it is new"])
        if then[number] != (name, plan.run_dir.name):
            return Kept(source, folders, [f"{name}: {then[number][1]} was in its place"])
        folder = followed(source / then[number][1])
        why = lacking(folder)
        if why:
            return Kept(source, folders, [f"{name}: {why}"])
        old = _moved(identity((rundir.read_json(folder / "record.json") or {})["composition"]), places)
        new = identity_of(plan.config)
        if old != new:
            return Kept(source, folders, rundir.differences(old, new, name))
        folders[name], places[str(folder)] = folder, str(plan.run_dir)
    return Kept(source, folders, [])


def _moved(content: Any, places: dict[str, str]) -> Any:
    """`content` with each path that lies in one of `places` as it is in the other."""
    if isinstance(content, dict):
        return {key: _moved(value, places) for key, value in content.items()}
    if isinstance(content, list):
        return [_moved(value, places) for value in content]
    for old, new in places.items() if isinstance(content, str) else ():
        if content == old or content.startswith(f"{old}/"):
            return new + content.removeprefix(old)
    return content


def lacks(folder: Path) -> str | None:
    """Why a phase there cannot be kept: it is not done, what it left is gone, or data or an adapter that it was given has changed."""
    recorded = rundir.read_json(folder / "record.json")
    if recorded is None:
        return f"there is no record of it in {folder}"
    faults = sealed.faults(recorded)
    if faults:
        return f"{folder / 'record.json'} cannot be trusted ({faults[0]})"
    if recorded["status"] != "done":
        return f"it is not done in {folder}"
    samples = (cycles.SELECTED, cycles.SCORED) if recorded["composition"]["method"]["name"] == "sample" else ()
    gone = [name for name in ("result.json", *samples, *recorded["outputs"]) if not (folder / name).is_file()]
    if gone:
        return f"{folder / gone[0]} is gone"
    changed = rundir.changed_data(recorded)
    return f"{changed[0]} has changed" if changed else None


def said(kept: Kept) -> str:
    """The line that says what is kept of which run, and why no more."""
    names = ", ".join(folder.name for folder in kept.folders.values())
    more = len(kept.ended_by) - MOST_SAID
    why = "; ".join(kept.ended_by[:MOST_SAID]) + (f"; and {more} more" if more > 0 else "")
    if not names:
        return f"Keeps nothing of {kept.source}: {why}."
    rest = f"runs what comes after: {why}" if why else "nothing is left to run"
    return f"Keeps {names} of {kept.source}; {rest}. resume=never keeps nothing."


def link(run_dir: Path, plans: dict[str, Plan]) -> None:
    """In `run_dir` a link for each phase that is kept. Relative, so that it leads there when both have been moved. Raises UserError."""
    for folder in outside(run_dir, plans).values():
        here = run_dir / folder.name
        if here.is_symlink():
            continue
        try:
            here.symlink_to(os.path.relpath(folder, run_dir))
        except OSError as error:
            why = f"a link to {folder} cannot be made ({error.strerror})"
            raise UserError(f"{here}: {why}. Use: resume=never, which keeps no phase.") from error
