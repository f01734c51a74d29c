"""The run directory: which one a run uses, its files written atomically, and a lock so that no two launchers share one."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.files import resuming, samples, sealed
from launch.plan import composition_hash, default_name, has_phases, identity, identity_of
from launch.schema import Config

LOCK_ATTEMPTS = 5
DAMAGED = "its record.json is damaged: it cannot be read as a JSON object"
AGAIN = "-again-"  # in the name of a run that reproduces another


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def choose(config: Config) -> tuple[Path, bool]:
    """(run directory, whether it continues an earlier run). Makes nothing."""
    home = home_of(config)
    if config.resume == "never":
        return home / fresh_name(), False
    if config.resume == "auto":
        # One that a job runs is chosen too: launch/runtimes/slurm.py follows or refuses, where another one would be a second job.
        found = newest_unfinished(home, composition_hash(config), with_running=config.runtime.name == "slurm")
        return (found, True) if found else (home / fresh_name(), False)
    return _asked_for(config), True


def home_of(config: Config) -> Path:
    """Where the runs of its name lie."""
    return Path(config.run_root).absolute() / (config.name or default_name(config))


def fresh_name() -> str:
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def newest_unfinished(home: Path, wanted: str, with_running: bool = False) -> Path | None:
    """The newest run of this composition that can go on, and is neither done nor, unless `with_running`, running now."""
    for folder, record in of_composition(home, wanted):
        if record.get("status") != "done" and (with_running or not is_locked(folder)) and not _bars(record):
            return folder
    return None


def of_composition(home: Path, wanted: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Runs of it and their records, the newest first; those that reproduce another are not among them."""
    for folder in sorted(home.glob("*/"), reverse=True) if home.is_dir() else []:
        record = read_json(folder / "record.json") or {}
        if record.get("composition_hash") == wanted and AGAIN not in folder.name:
            yield folder, record


def left(config: Config, chosen: Path) -> list[str]:
    """What is said under resume=auto where a newer run than `chosen` did not end, and cannot go on."""
    wanted, home = composition_hash(config), home_of(config)
    for folder in sorted(home.glob("*/"), reverse=True) if config.resume == "auto" and home.is_dir() else []:
        record = read_json(folder / "record.json")
        if record is None and (folder / "record.json").exists():
            return [f"{folder} is not gone on with: {DAMAGED}."]
        if record is None or AGAIN in folder.name or record.get("composition_hash") != wanted:
            continue
        if folder == chosen or record.get("status") == "done" or is_locked(folder):
            return []
        return [f"{folder} is not gone on with: {why}." for why in _bars(record)]
    return []


def _bars(record: dict[str, Any]) -> list[str]:
    """Why an unfinished run cannot go on."""
    doubt = sealed.doubt(record)
    if doubt:
        return [doubt]
    changed = changed_data(record)
    return [f"{', '.join(changed)} changed since that run began"] if changed else []


def untrusted(folder: Path) -> str | None:
    """Why the record there, if there is one, cannot be trusted."""
    file = folder / "record.json"
    record = read_json(file)
    if record is None:
        return DAMAGED if os.path.exists(file) else None
    return sealed.doubt(record)


def runs_in(folder: Path) -> str:
    """Of a folder that was given for a run and holds some: the newest of them, for a message."""
    newest = max(folder.glob("*/record.json"), key=lambda file: file.parent.name, default=None)
    return f" It holds runs, the newest is {newest.parent}." if newest else ""


def changed_data(record: dict[str, Any]) -> list[str]:
    """Files of data and of the adapter, and directories of samples, that are not what they were when the run began: its checkpoint has
    seen other rows, or is of other weights."""
    data = record.get("data") or {}
    known = data.get("files", {}) | (record.get("model") or {}).get("adapter", {})
    files = [path for path, digest in known.items() if not Path(path).is_file() or sha256(Path(path)) != digest]
    return [*files, *(path for path, listed in data.get("folders", {}).items() if _files(path) != listed)]


def _files(path: str) -> list[str] | None:
    try:
        return samples.files(path)
    except UserError:  # it could be listed then; whoever is to read it now says what is wrong with it
        return None


def _asked_for(config: Config) -> Path:
    folder = Path(config.resume).absolute()
    record = read_json(folder / "record.json")
    if record is None:
        if os.path.exists(folder / "record.json"):
            raise UserError(f"resume={config.resume}: {DAMAGED}. Its run cannot go on; resume=never starts afresh.")
        raise UserError(f"resume={config.resume}: no record.json there.{runs_in(folder)} Give auto, never, or a run directory.")
    if record.get("status") == "done":
        raise UserError(f"resume={config.resume}: that run is done. resume=never runs the composition again.")
    if is_locked(folder):
        raise UserError(f"resume={config.resume}: that run is running now. Wait until it has ended, or stop it; then say the same again.")
    bars = _bars(record)
    if bars:
        raise UserError(f"resume={config.resume}: {bars[0]}. resume=never starts afresh.")
    differing = differences(identity(record["composition"]), identity_of(config))
    of_another = resuming.another(differing)
    if of_another:
        remedy = " resume=auto begins another run and keeps the phases before the change." if has_phases(config) else ""
        raise UserError(f"resume={config.resume}: another composition; it differs in {'; '.join(of_another)}.{remedy}")
    if differing:
        resuming.check(config.resume, resuming.recorded_config(record["composition"]), config)
    return folder


def moved(config: Config, folder: Path) -> list[str]:
    """What the plan says where `resume` names a run, `folder`, that began on other ranks."""
    if config.resume in ("auto", "never"):
        return []
    return resuming.note(resuming.recorded_config((read_json(folder / "record.json") or {})["composition"]), config)


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """`key: old -> new` for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [line for key in sorted({*old, *new}) for line in differences(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))]
    return [] if old == new else [f"{at}: {old} -> {new}"]


def make(folder: Path) -> None:
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}). Choose another place by run_root=<directory>.") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run for this launcher. The kernel lets go when the launcher dies, however it dies."""
    with (folder / ".lock").open("w") as file:
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if attempt == LOCK_ATTEMPTS - 1:
                    raise UserError(
                        f"{folder}: another launcher runs this run now. Wait until it has ended, or stop it; then say the same again."
                    ) from error
                time.sleep(0.02)  # somebody who only asks (is_locked) holds it for a moment too
        yield


def is_locked(folder: Path) -> bool:
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: a temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        if os.path.exists(temporary):
            temporary.unlink()
        raise


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or one that is no JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl; a last line that is still being written is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
