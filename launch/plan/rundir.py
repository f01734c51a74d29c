"""Choose the run directory, explain why a run cannot resume, and lock it for one launcher."""

import datetime
import fcntl
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from launch.config.identity import (
    composition_hash,
    default_name,
    has_phases,
    identity,
    identity_of,
    may_have_hash,
    recorded_hash,
)
from launch.core.errors import UserError
from launch.core.json_files import read_json, sha256_once
from launch.inputs import sample_files
from launch.inputs.paths import LATEST, pinned, run_hash
from launch.plan import resuming, sealed
from launch.schema import Config

LOCK_ATTEMPTS = 5
DAMAGED = "its record.json is damaged and cannot be read as a JSON object"
MISSING = "its record.json is missing"
BUSY = "another launcher is executing this run. Stop it or wait until it ends, then try again."
STARTED = re.compile(r"\d{8}-\d{6}")  # the time in the name of a run
TIME_FORMAT = "%Y%m%d-%H%M%S"
# Directories in memory or on a local disk. They hold a run's lock if its file system has no locks.
LOCAL_LOCKS = (Path("/dev/shm"), Path("/tmp"))
MAX_KEYS = 3  # that are named
AGAIN = "-again-"  # part of the name of a run that reproduces another
FRESH_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


def choose(config: Config, starts: bool = False) -> tuple[Path, bool]:
    """Return the run directory and whether it resumes an earlier run; create nothing.

    Raises UserError if resume=<run directory> cannot resume, or if the run `starts` now although
    another launcher is executing it.
    """
    home = runs_dir(config)
    if config.resume == "never":
        return home / fresh_name(home), False
    if config.resume == "auto":
        # Under Slurm, a run whose job is running counts too. launch/execution/slurm.py follows that
        # job instead of starting a second one.
        on_slurm = config.runtime.name == "slurm"
        for folder, record in runs_with_hash(home, composition_hash(config)):
            if record is None or record.get("status") == "done":
                continue
            is_running = not on_slurm and is_locked(folder)
            if (is_running and not starts) or _obstacle(folder, record):
                continue
            if is_running:
                raise UserError(f"{folder}: {BUSY} Use resume=never for another run.")
            return folder, True
        return home / fresh_name(home), False
    return _requested(config), True


def runs_dir(config: Config) -> Path:
    """Return the absolute directory of all runs with this composition's name."""
    return Path(config.run_root).absolute() / (config.name or default_name(config))


def fresh_name(home: Path | None = None) -> str:
    """Return a name for a new run, which sorts after all runs in `home`.

    Its time is later than theirs, even if the clock was set back or they began in this second.
    """
    now = datetime.datetime.now()
    names = os.listdir(home) if home and home.is_dir() else []
    newest = max((time[0] for name in names if (time := STARTED.match(name))), default="")
    with suppress(ValueError, OverflowError):  # not a time
        after = datetime.datetime.strptime(newest, TIME_FORMAT) + datetime.timedelta(seconds=1)
        now = max(now, after)
    return f"{now:{TIME_FORMAT}}-{secrets.token_hex(3)}"


def run_dirs(home: Path) -> list[Path]:
    """Return the directories in `home`, newest first, without the link to the newest."""
    return sorted((folder for folder in home.glob("*/") if folder.name != LATEST), reverse=True)


def runs_with_hash(home: Path, hash_: str) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield (folder, record) of the runs with this composition hash, newest first.

    Runs that reproduce another run are left out. The record is None if it cannot be read. Such a
    run is left out if its plan.json has another hash, or if it lacks a record and results.
    """
    for folder in run_dirs(home):
        if AGAIN in folder.name or not may_have_hash(folder / "record.json", hash_):
            continue
        record = read_json(folder / "record.json")
        if record is not None:
            is_same = recorded_hash(record) == hash_
        else:
            traces = ("record.json", "metrics.jsonl", "checkpoints")
            has_begun = any(os.path.lexists(folder / name) for name in traces)
            has_begun = has_begun or any(folder.glob("*/record.json"))  # the phases of a pipeline
            has_begun = has_begun or not os.access(folder, os.R_OK | os.X_OK)
            plan = read_json(folder / "plan.json") or {}
            is_same = has_begun and plan.get("composition_hash", hash_) == hash_
        if is_same:
            yield folder, record


def skipped_run_notes(config: Config, run_dir: Path) -> list[str]:
    """Return notes if resume=auto skipped unfinished runs that are newer than `run_dir`.

    Of the runs with a readable record, only the newest has a note. A new run says in which keys it
    differs from an unfinished one of its name.
    """
    notes: list[str] = []
    if config.resume != "auto":
        return notes
    for folder, record in runs_with_hash(runs_dir(config), composition_hash(config)):
        if folder == run_dir or (record or {}).get("status") == "done":
            break
        if is_locked(folder):
            notes.append(f"{folder}: {BUSY} Use resume=never for another run.")
            break
        if obstacle := _obstacle(folder, record):
            notes.append(f"Not resuming {folder}: {obstacle}.")
        if record is not None:
            break
    return notes or ([] if run_dir.exists() else [*_changed_keys(config)])


def _changed_keys(config: Config) -> Iterator[str]:
    """Yield a note if the newest run of this name is unfinished and has another composition."""
    folder = next((f for f in run_dirs(runs_dir(config)) if AGAIN not in f.name), None)
    record = folder and read_json(folder / "record.json")
    if not folder or not record or record.get("status") == "done" or record_problem(folder):
        return
    old = record["composition"]
    changes = differences(identity(old), identity_of(config))
    keys = [change.partition(": ")[0] for change in changes]
    if keys and old.get("smoke") == config.smoke:
        more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
        names = f"{', '.join(keys[:MAX_KEYS])}{more}"
        yield f"A new run, because {names} differ from the unfinished {folder}."


def _obstacle(folder: Path, record: dict[str, Any] | None) -> str | None:
    """Return why an unfinished run cannot resume, or None if it can."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "you cannot read it or write to it"
    if record is None:
        return DAMAGED if os.path.lexists(folder / "record.json") else MISSING
    if problem := sealed.problem(record):
        return problem
    checkpoints = folder / "checkpoints"
    if checkpoints.is_symlink() and not checkpoints.is_dir():
        return f"its checkpoints are a link to {os.readlink(checkpoints)}, which is missing"
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
    """Return the data, reward and adapter files and sample directories that changed.

    A checkpoint of such a run was trained on other rows or rewards, or belongs to other weights.
    """
    data = record.get("data") or {}
    digests = data.get("files", {}) | (record.get("model") or {}).get("adapter", {})
    changed = [
        path
        for path, digest in digests.items()
        if not Path(path).is_file() or sha256_once(Path(path)) != digest
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
    elif obstacle := _obstacle(folder, record):
        problem = f"{obstacle}. Use: resume=never for a fresh run."
    elif record:
        changes = differences(identity(record["composition"]), identity_of(config))
        # the lines are `key: old -> new`
        keys = resuming.PLACEMENT_KEYS
        if forbidden := [c for c in changes if not keys.fullmatch(c.partition(": ")[0])]:
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
    for _ in range(LOCK_ATTEMPTS):
        if file := _lock(folder, "a", fcntl.LOCK_EX):
            break
        time.sleep(0.02)  # another process's is_locked takes the lock briefly
    else:
        raise UserError(f"{folder}: {BUSY}")
    with file:
        if Path(file.name).parent != folder:
            print(
                f"warning: {folder}: its file system has no locks, so launchers on other machines "
                "are not noticed. Start this run on one machine only.",
                file=sys.stderr,
            )
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a launcher is executing this run."""
    try:
        file = _lock(folder, "r", fcntl.LOCK_SH)
    except OSError:  # the lock file does not exist, or belongs to another user
        return False
    if file:
        file.close()
    return file is None


def _lock(folder: Path, mode: str, operation: int) -> IO[Any] | None:
    """Open and lock a run's file; None if another process has it.

    If its file system has no locks, use a file on this machine. Raises OSError.
    """
    local = next((path for path in LOCAL_LOCKS if os.access(path, os.W_OK)), folder)
    name = f"rocm-recipes-{os.getuid()}-{run_hash(folder)}.lock"
    for path in (folder / ".lock", local / name):
        file = path.open(mode)
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
            return file
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                return None
            problem = error
    raise OSError(problem.errno, problem.strerror, str(path))
