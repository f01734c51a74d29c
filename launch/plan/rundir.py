"""Choose the run directory, explain why a run cannot resume, and lock it for one launcher."""

from __future__ import annotations

import datetime
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launch.config.identity import (
    composition_hash,
    default_name,
    has_phases,
    identity,
    identity_of,
    recorded_hash,
)
from launch.core.errors import UserError
from launch.core.json_files import read_json, sha256
from launch.inputs import sample_files
from launch.inputs.paths import LATEST, pinned
from launch.plan import resuming, sealed
from launch.schema import Config

LOCK_ATTEMPTS = 5
DAMAGED = "its record.json is damaged and cannot be read as a JSON object"
AGAIN = "-again-"  # part of the name of a run that reproduces another
FRESH_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


def choose(config: Config) -> tuple[Path, bool]:
    """Return the run directory and whether it resumes an earlier run; create nothing.

    Raises UserError if resume=<run directory> cannot resume.
    """
    home = runs_dir(config)
    if config.resume == "never":
        return home / fresh_name(), False
    if config.resume == "auto":
        # Under Slurm, a run whose job is running counts too. launch/execution/slurm.py follows that
        # job instead of starting a second one.
        on_slurm = config.runtime.name == "slurm"
        unfinished = newest_unfinished(home, composition_hash(config), with_running=on_slurm)
        return (unfinished, True) if unfinished else (home / fresh_name(), False)
    return _requested(config), True


def runs_dir(config: Config) -> Path:
    """Return the absolute directory of all runs with this composition's name."""
    return Path(config.run_root).absolute() / (config.name or default_name(config))


def fresh_name() -> str:
    """Return a directory name that FRESH_NAME matches."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def run_dirs(home: Path) -> list[Path]:
    """Return the directories in `home`, newest first, without the link to the newest."""
    return sorted((folder for folder in home.glob("*/") if folder.name != LATEST), reverse=True)


def newest_unfinished(home: Path, hash_: str, with_running: bool = False) -> Path | None:
    """Return the newest unfinished run with composition hash `hash_` that can resume, or None.

    Runs whose launcher is running are skipped, unless `with_running`.
    """
    for folder, record in runs_with_hash(home, hash_):
        is_available = with_running or not is_locked(folder)
        if record.get("status") != "done" and is_available and not _obstacle(record):
            return folder
    return None


def runs_with_hash(home: Path, hash_: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield (folder, record) of the runs with this composition hash, newest first.

    Runs that reproduce another run are left out.
    """
    for folder in run_dirs(home):
        record = read_json(folder / "record.json") or {}
        if recorded_hash(record) == hash_ and AGAIN not in folder.name:
            yield folder, record


def skipped_run_notes(config: Config, run_dir: Path) -> list[str]:
    """Return a note if resume=auto skipped an unfinished run that is newer than `run_dir`."""
    for folder in run_dirs(runs_dir(config)):
        record = read_json(folder / "record.json")
        is_damaged = record is None and os.path.exists(folder / "record.json")
        is_same = record and recorded_hash(record) == composition_hash(config)
        if config.resume != "auto" or not (is_damaged or is_same) or AGAIN in folder.name:
            continue
        if folder == run_dir or (record or {}).get("status") == "done" or is_locked(folder):
            return []
        obstacle = _obstacle(record)
        return [f"Not resuming {folder}: {obstacle}."] if obstacle else []
    return []


def _obstacle(record: dict[str, Any] | None) -> str | None:
    """Return why an unfinished run cannot resume, or None if it can."""
    if record is None:
        return DAMAGED
    if problem := sealed.problem(record):
        return problem
    changed = changed_data(record)
    return f"{', '.join(changed)} changed since that run began" if changed else None


def record_problem(folder: Path) -> str | None:
    """Return why a run's record cannot be trusted; None if it can, or if there is no record."""
    file = folder / "record.json"
    record = read_json(file)
    if record is None:
        return DAMAGED if os.path.exists(file) else None
    return sealed.problem(record)


def runs_in(folder: Path) -> str:
    """Return a hint that names the newest run in a folder, or '' if it contains none."""
    newest = next((run for run in run_dirs(folder) if (run / "record.json").is_file()), None)
    return f" It contains runs; the newest is {newest}." if newest else ""


def changed_data(record: dict[str, Any]) -> list[str]:
    """Return the data files, adapter files and sample directories that changed since the start.

    A checkpoint of such a run was trained on other rows or belongs to other weights.
    """
    data = record.get("data") or {}
    digests = data.get("files", {}) | (record.get("model") or {}).get("adapter", {})
    changed = [
        path
        for path, digest in digests.items()
        if not Path(path).is_file() or sha256(Path(path)) != digest
    ]
    for folder, files in data.get("folders", {}).items():
        with suppress(UserError):  # the check of this run's data reports it
            if sample_files.files(folder) == files:
                continue
        changed.append(folder)
    return changed


def _requested(config: Config) -> Path:
    """Return the directory of resume=<run directory>.

    Raises UserError if this composition cannot resume there.
    """
    folder = pinned(config.resume)
    file = folder / "record.json"
    record, problem, changes = read_json(file), None, list[str]()
    if record is None and not os.path.exists(file):
        problem = (
            f"there is no record.json.{runs_in(folder)} Use: resume=auto, never or a run directory."
        )
    elif record and record.get("status") == "done":
        problem = "that run is done. Use: resume=never for another run."
    elif is_locked(folder):
        problem = "that run is still running. Stop it or wait until it ends, then try again."
    elif obstacle := _obstacle(record):
        problem = f"{obstacle}. Use: resume=never for a fresh run."
    elif record:
        changes = differences(identity(record["composition"]), identity_of(config))
        if forbidden := resuming.without_placement(changes):
            problem = f"that run has another composition. It differs in {'; '.join(forbidden)}."
            if has_phases(config):
                problem += (
                    " Use: resume=auto for another run that keeps the phases before the change."
                )
    if problem:
        raise UserError(f"resume={config.resume}: {problem}")
    if record and changes:
        resuming.check(config.resume, resuming.recorded_config(record["composition"]), config)
    return folder


def changed_rank_notes(config: Config, run_dir: Path) -> list[str]:
    """Return a note for the plan if resume=<run directory> continues a run on different ranks."""
    if config.resume in ("auto", "never"):
        return []
    composition = (read_json(run_dir / "record.json") or {})["composition"]
    return resuming.notes(resuming.recorded_config(composition), config)


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Return `key: old -> new` for every nested value that differs, under `key`."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for k in sorted({*old, *new})
            for line in differences(old.get(k), new.get(k), f"{key}.{k}" if key else str(k))
        ]
    return [] if old == new else [f"{key}: {old} -> {new}"]


def make(folder: Path) -> None:
    """Create a run directory, and let runs/<name>/latest point to it. Raises UserError."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be created ({error.strerror}). Use: run_root=<another directory>."
        ) from error
    if FRESH_NAME.fullmatch(folder.name):  # neither a phase nor the reproduction of a run
        link = folder.with_name(f".{LATEST}.{folder.name}")
        with suppress(OSError):  # a file system without links; the run does not need it
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name)
            link.replace(folder.with_name(LATEST))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the run for this launcher. The kernel releases the lock even if the launcher is killed.

    Raises UserError if another launcher has the lock.
    """
    with (folder / ".lock").open("w") as file:
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if attempt == LOCK_ATTEMPTS - 1:
                    raise UserError(
                        f"{folder}: another launcher is executing this run. Stop it or wait until "
                        "it ends, then try again."
                    ) from error
                time.sleep(0.02)  # another process's is_locked takes the lock briefly
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a launcher is executing this run."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True
