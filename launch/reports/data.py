"""Read run directories for a report, whether done, running, crashed or damaged."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from launch.core import json_files
from launch.core.errors import UserError, near
from launch.execution import logs
from launch.execution.meaning import of as meaning_of
from launch.execution.supervise import failures
from launch.inputs.paths import followed
from launch.plan import rundir

# A directory with one of these files is a run's.
RUN_FILES = ("record.json", "plan.json", "config.yaml", "metrics.jsonl", "result.json")
EXAMPLE = "runs/<name>/<timestamp>-<id>"
PHASE = re.compile(r"[\w.-]{1,200}")  # the name of a phase's directory
NAMED_FAULTS = 5  # bad lines of a metrics.jsonl that are listed; the others are only counted
LAST_LINES = 20
LARGEST = 1e150  # differences, sums and squares of smaller numbers are finite
# Type -> the keys of that type which a page reads. A value of another type is reported and dropped.
SHAPES = {
    "record.json": {
        dict: "composition host code packages image data phases",
        list: "overrides",
    },
    "plan.json": {
        dict: "speed trainer_args targets image",
        list: "processes memory warnings",
    },
    "result.json": {
        dict: "before after by_task by_level by_task_and_level lm_eval "
        "pass_at_k maj_at_k pass_at_k_interval maj_at_k_interval",
        list: "columns rows notes below overrides samples interval right_per_problem",
    },
}
# PyYAML's C loader is ten times as fast, but not always installed.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Points = tuple[list[float], list[float]]  # steps and values


@dataclass(frozen=True)
class Metrics:
    """The readable lines of a metrics.jsonl in order, and what is wrong with the others."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}

    @functools.cached_property
    def numeric_keys(self) -> list[str]:
        """List the keys that have a number in some line, in order of appearance."""
        keys: dict[str, None] = {}
        for row in self.rows:
            if not row.keys() <= keys.keys():
                keys |= dict.fromkeys(key for key, value in row.items() if is_number(value))
        return list(keys)

    def points(self, key: str) -> Points:
        """Return the steps and values of the lines in which `key` is a number."""
        rows = [row for row in self.rows if is_number(row.get(key))]
        return [float(row["step"]) for row in rows], [float(row[key]) for row in rows]

    def notes(self) -> list[str]:
        """Tell the reader how many lines were skipped, and which."""
        if not self.faults:
            return []
        named = "; ".join(self.faults[:NAMED_FAULTS])
        if len(self.faults) > NAMED_FAULTS:
            named += f"; and {len(self.faults) - NAMED_FAULTS:,} more"
        total = len(self.faults) + len(self.rows)
        return [f"metrics.jsonl: {len(self.faults):,} of {total:,} lines skipped: {named}."]


@dataclass(frozen=True)
class Run:
    """One run. The content of a damaged file is empty, and `unreadable` names the file.

    `status` is the record's, or one of: lost (the launcher died), unknown (no record), waiting (not
    started), gone (a phase reused from another run, which was deleted).
    """

    folder: Path
    name: str
    status: str
    record: dict[str, Any]
    plan: dict[str, Any]
    result: dict[str, Any]
    config: dict[str, Any]  # the composition
    metrics: Metrics
    unreadable: list[str]

    @property
    def exit_code(self) -> int | None:
        return self.record.get("exit_code")

    @property
    def notes(self) -> list[str]:
        """Return what is wrong with the run's files."""
        return [*self.unreadable, *self.metrics.notes()]

    @property
    def warnings(self) -> list[str]:
        return [*self.notes, *map(str, self.plan.get("warnings") or [])]

    def get(self, *keys: str) -> Any:
        """Return a value of the composition, or None."""
        return dig(self.config, *keys)

    def named(self, group: str) -> Any:
        """Return the option of a config group, from the composition or the plan."""
        return self.get(group, "name") or self.plan.get(group)


@dataclass(frozen=True)
class Words:
    """The last lines of a process's log; `meaning` is what they usually mean."""

    process: str
    log: str
    lines: list[str]
    why: str | None
    meaning: str | None


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number to compute with; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def dig(content: Any, *keys: str) -> Any:
    """Return content[a][b]..., or None if a key on the way is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def listed(content: Any) -> list[Any]:
    """Return a list unchanged, or [] for anything else."""
    return content if isinstance(content, list) else []


def objects(content: Any) -> list[dict[str, Any]]:
    """Return the items of a list that are objects."""
    return [item for item in listed(content) if isinstance(item, dict)]


def mapping(content: Any) -> dict[str, Any]:
    """Return a dict unchanged, or {} for anything else."""
    return content if isinstance(content, dict) else {}


def kind_of(folder: Path) -> str:
    """Return sweep, pipeline or run. Raises UserError for anything else."""
    # os.path, because Path.is_file raises for a name that is too long.
    if os.path.isfile(folder / "sweep.json"):
        return "sweep"
    if isinstance((json_files.read_json(folder / "record.json") or {}).get("phases"), dict):
        return "pipeline"
    if any(os.path.isfile(folder / name) for name in RUN_FILES):
        return "run"
    if os.path.isdir(folder):
        runs = sorted(path.parent for path in folder.glob("*/record.json"))
        hint = f" It holds {len(runs)} run(s), for example {runs[-1]}." if runs else ""
    else:
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else []
        hint = near(folder.name, [path.name for path in siblings if path.is_dir()])
    raise UserError(f"{folder} is not the directory of a run.{hint} Use {EXAMPLE}.")


def phases_of(folder: Path) -> list[Path]:
    """Return the directories of a pipeline's phases in order, including phases not started.

    For a phase that was reused from another, deleted run, return the dangling link.
    """
    names = (_object(folder / "record.json", []).get("phases") or {}).values()
    links = [folder / name for name in names if isinstance(name, str) and PHASE.fullmatch(name)]
    return [target if (target := followed(link)).is_dir() else link for link in links]


def read(folder: Path, name: str | None = None) -> Run:
    """Read a run's directory. Missing or damaged files leave their part of the run empty."""
    unreadable: list[str] = []
    # Check the lock before the record, so that a run that ends in between is done, not lost.
    was_locked = rundir.is_locked(folder)
    files = ("record.json", "plan.json", "result.json")
    record, plan, result = (_object(folder / file, unreadable) for file in files)
    status = status_of(folder, record, was_locked)
    config, file = record.get("composition") or {}, folder / "config.yaml"
    if not config and file.is_file():
        try:
            config = mapping(yaml.load(file.read_bytes(), Loader=LOADER))
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            unreadable.append(f"config.yaml: cannot be read ({str(error).splitlines()[0]}).")
    try:
        metrics = read_metrics(folder / "metrics.jsonl", still_written=status == "running")
    except OSError as error:
        metrics = Metrics()
        unreadable.append(f"metrics.jsonl: cannot be read ({error.strerror}).")
    name = name or f"{folder.parent.name}/{folder.name}"
    return Run(folder, name, status, record, plan, result, config, metrics, unreadable)


def status_of(folder: Path, record: dict[str, Any], held: bool) -> str:
    """Return the status of a run; `held`: its lock was held before `record` was read."""
    if folder.is_symlink() and not folder.exists():
        return "gone"
    if not record:
        return "unknown" if any((folder / name).exists() for name in RUN_FILES) else "waiting"
    if record.get("status") == "running" and not held:
        return "lost"
    return str(record.get("status") or "unknown")


def read_metrics(path: Path, still_written: bool = False) -> Metrics:
    """Read the lines that are objects with a step, and list the faults of the others.

    If the run is still writing the file, an incomplete last line is not a fault.
    """
    if not path.is_file():
        return Metrics()
    rows, faults = [], []
    # Python writes NaN and Infinity, which JSON does not have. Read them as missing points.
    decode = json.JSONDecoder(parse_constant=lambda _: None).decode
    *lines, rest = path.read_bytes().split(b"\n")
    if rest and not still_written:
        lines.append(rest)
    for number, line in enumerate(lines, start=1):
        row, fault = _row(line, decode)
        if fault:
            faults.append(f"line {number}: {fault}")
        else:
            rows.append(row)
    return Metrics(rows, faults)


def _row(line: bytes, decode: Callable[[str], Any]) -> tuple[dict[str, Any], str]:
    """Return the line's object and its fault, which is empty if there is none."""
    if not line.strip():
        return {}, "empty"
    try:
        row = decode(line.decode())
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 at byte {error.start + 1}"
    except RecursionError:
        return {}, "nested too deep"
    except ValueError as error:
        return {}, f"not JSON, {error}"
    if not isinstance(row, dict):
        return {}, f"{type(row).__name__} instead of an object"
    return row, "" if is_number(row.get("step")) else "no step in it"


def _object(path: Path, unreadable: list[str]) -> dict[str, Any]:
    """Return a JSON object whose values have the types of SHAPES; add faults to `unreadable`."""
    content = json_files.read_json(path)
    if content is None and os.path.exists(path):
        unreadable.append(
            f"{path.name}: cannot be read as a JSON object; its contents are missing."
        )
    content = content or {}
    for shape, keys in SHAPES[path.name].items():
        for key in keys.split():
            value = content.get(key)
            if value is not None and not isinstance(value, shape):
                wrong = f"{key} is {type(value).__name__} instead of {shape.__name__}"
                unreadable.append(f"{path.name}: {wrong}, and left out.")
                del content[key]
    return content


def last_words(run: Run) -> Iterator[Words]:
    """Yield the end of the first failed rank's log, or of all logs if that rank is unknown."""
    folder = run.folder / "logs"
    first = next(iter(failures(run.folder)), None)
    files = sorted(file for file in folder.glob("*.log") if file.is_file())
    # The log of a process group repeats what its ranks write.
    chosen = [file for file in files if not file.stem.startswith("rank")]
    if first is not None:
        own = folder / f"rank{first['rank']}.log"
        if own in files and own.stat().st_size:
            chosen = [own]
        else:
            # the process group whose ranks write failures/
            others = ("server", "prepare", "verifier")
            groups = [p for p in objects(run.plan.get("processes")) if p.get("kind") not in others]
            training = groups[0].get("name") if groups else "trainers"
            chosen = [file for file in files if file.stem == training]
    for file in chosen or files:
        words = logs.last_words(file, count=1000)
        why = str(first["error"]) if first else logs.root_cause(words.lines)
        if why is None and words.exit_code is not None:
            code = words.exit_code
            why = logs.killed_by(-code) if code < 0 else f"exit code {code}"
        lines = words.lines[-LAST_LINES:]
        name = file.stem + (f", rank {first['rank']}" if first else "")
        meaning = meaning_of([why or ""]) or meaning_of(lines)
        if lines:
            yield Words(name, f"logs/{file.name}", lines, why, meaning)
