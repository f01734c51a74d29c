"""A run directory as a report sees it: read only, whole or not, whether the run is done, going on, or died in the middle."""

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

from launch.errors import UserError, near
from launch.files import rundir
from launch.files.paths import followed
from launch.supervision import logs
from launch.supervision.meaning import of as meaning_of
from launch.supervision.supervise import failures

# One of these makes a directory a run's.
RUN_FILES = ("record.json", "plan.json", "config.yaml", "metrics.jsonl", "result.json")
PHASE = re.compile(r"[\w.-]{1,200}")  # the name of a phase's directory
NAMED_FAULTS = 5  # lines of a metrics.jsonl that are named one by one; the others are counted
LAST_LINES = 20
LARGEST = 1e150  # differences, sums and squares of smaller ones are finite
# What a page reads into. A value of another type is left out, and named.
SHAPES: dict[str, dict[str, type]] = {
    "record.json": dict.fromkeys(("composition", "host", "code", "packages", "image", "data", "phases"), dict) | {"overrides": list},
    "plan.json": dict.fromkeys(("speed", "trainer_args", "targets", "image"), dict)
    | dict.fromkeys(("processes", "memory", "warnings"), list),
    "result.json": dict.fromkeys(("before", "after", "by_task", "by_level", "by_task_and_level", "lm_eval"), dict)
    | dict.fromkeys(("pass_at_k", "maj_at_k", "pass_at_k_interval", "maj_at_k_interval"), dict)
    | dict.fromkeys(("columns", "rows", "notes", "below", "overrides", "samples", "interval", "right_per_problem"), list),
}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of C where PyYAML has it: ten times as fast

Points = tuple[list[float], list[float]]  # steps and values


@dataclass(frozen=True)
class Metrics:
    """The lines of a metrics.jsonl that could be read, in their order, and what is wrong with the others."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}

    @functools.cached_property
    def numeric_keys(self) -> list[str]:
        """Every key that a line has a number for, in order of appearance."""
        found: dict[str, None] = {}
        for row in self.rows:
            if not row.keys() <= found.keys():
                found |= dict.fromkeys(key for key, value in row.items() if is_number(value))
        return list(found)

    def points(self, key: str) -> Points:
        """Steps and values of the lines that have a number there."""
        kept = [(row["step"], value) for row in self.rows if is_number(value := row.get(key))]
        return [float(step) for step, _ in kept], [float(value) for _, value in kept]

    def said(self) -> list[str]:
        """For a reader: how many lines were skipped, and which."""
        if not self.faults:
            return []
        more = len(self.faults) - NAMED_FAULTS
        named = "; ".join(self.faults[:NAMED_FAULTS]) + (f"; and {more:,} more" if more > 0 else "")
        return [f"metrics.jsonl: {len(self.faults):,} of {len(self.faults) + len(self.rows):,} lines skipped: {named}."]


@dataclass(frozen=True)
class Run:
    """One run. What could not be read is empty, and `unreadable` says so."""

    folder: Path
    name: str
    status: str  # done, failed, hung, interrupted, running, lost (its launcher is gone), unknown (no record), waiting (nothing yet), gone
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
        """What the reader of a report has to know of the files it is made from."""
        return [*self.unreadable, *self.metrics.said()]

    def get(self, *keys: str) -> Any:
        """A value of the composition; None where there is none."""
        return dig(self.config, *keys)


@dataclass(frozen=True)
class Words:
    """The last lines of a process's log; `meaning` is what they usually mean."""

    process: str
    log: str
    lines: list[str]
    why: str | None = None
    meaning: str | None = None


def is_number(value: Any) -> TypeGuard[float]:
    """A finite one that can be reckoned with; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def dig(content: Any, *keys: str) -> Any:
    """content[a][b]...; None where a step of it is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def kind_of(folder: Path) -> str:
    """sweep, pipeline or run. Raises UserError for anything else."""
    if os.path.isfile(folder):
        of_run = any((folder.parent / name).is_file() for name in ("sweep.json", *RUN_FILES))
        said = f"the one that it is in: {folder.parent}" if of_run else "the directory of a run, runs/<name>/<timestamp>-<id>"
        raise UserError(f"{folder}: a file, and a directory is needed. Give {said}.")
    if not os.path.isdir(folder):  # not Path's own, which raises for a name that is too long
        beside = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise UserError(
            f"{folder}: no such directory.{near(folder.name, beside)} Give the directory of a run, runs/<name>/<timestamp>-<id>."
        )
    if (folder / "sweep.json").is_file():
        return "sweep"
    if isinstance((rundir.read_json(folder / "record.json") or {}).get("phases"), dict):
        return "pipeline"
    if any((folder / name).is_file() for name in RUN_FILES):
        return "run"
    inside = sorted(p.parent for p in folder.glob("*/record.json"))
    if inside:
        raise UserError(f"{folder}: holds {len(inside)} run(s) and is none itself. Give one or several of them, for example {inside[-1]}.")
    raise UserError(f"{folder}: no run there (it has none of {', '.join(RUN_FILES)}). Give runs/<name>/<timestamp>-<id>.")


def phases_of(folder: Path) -> list[Path]:
    """The runs of a pipeline, in order, those that have not begun too. Of one that was kept of another run and is gone, the link."""
    names = (_object(folder / "record.json", []).get("phases") or {}).values()
    here = [folder / name for name in names if isinstance(name, str) and PHASE.fullmatch(name)]
    return [place if (place := followed(link)).is_dir() else link for link in here]


def read(folder: Path, name: str | None = None) -> Run:
    """The run of a directory, or what there is of it."""
    unreadable: list[str] = []
    held = rundir.is_locked(folder)  # before its record is read: a run that ends meanwhile is done, not lost
    record, plan, result = (_object(folder / file, unreadable) for file in ("record.json", "plan.json", "result.json"))
    status = status_of(folder, record, held)
    config = record.get("composition") or _yaml(folder / "config.yaml", unreadable)
    try:
        metrics = read_metrics(folder / "metrics.jsonl", still_written=status == "running")
    except OSError as error:
        metrics = Metrics()
        unreadable.append(f"metrics.jsonl: cannot be read ({error.strerror}).")
    return Run(folder, name or f"{folder.parent.name}/{folder.name}", status, record, plan, result, config, metrics, unreadable)


def status_of(folder: Path, record: dict[str, Any], held: bool) -> str:
    """`held`: a launcher had the directory's lock before `record` was read."""
    if folder.is_symlink() and not folder.exists():
        return "gone"
    if not record:
        return "unknown" if any((folder / name).exists() for name in RUN_FILES) else "waiting"
    if record.get("status") == "running" and not held:
        return "lost"
    return str(record.get("status") or "unknown")


def read_metrics(path: Path, still_written: bool = False) -> Metrics:
    """Every line that is an object with a step. The others are named with what is wrong with them.

    `still_written`: a last line without its end is being written, and nothing is wrong with it.
    """
    if not path.is_file():
        return Metrics()
    content = path.read_bytes()
    rows, faults = [], []
    # No NaN and no Infinity in JSON; Python writes them all the same. They are points that are not there.
    decode = json.JSONDecoder(parse_constant=lambda _: None).decode
    *lines, rest = content.split(b"\n")
    if rest and not still_written:
        lines.append(rest)
    for number, line in enumerate(lines, start=1):
        row, wrong = _row(line, decode)
        if row is not None:
            rows.append(row)
        elif wrong:
            faults.append(f"line {number}: {wrong}")
    return Metrics(rows, faults)


def _row(line: bytes, decode: Callable[[str], Any]) -> tuple[dict[str, Any] | None, str | None]:
    """(the line's object, None) or (None, what is wrong with it)."""
    if not line.strip():
        return None, "empty"
    try:
        row = decode(line.decode())
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start + 1}"
    except RecursionError:
        return None, "nested too deep"
    except ValueError as error:
        return None, f"no JSON, {error}"
    if not isinstance(row, dict):
        return None, f"{type(row).__name__} in place of an object"
    return (row, None) if is_number(row.get("step")) else (None, "no step in it")


def _object(path: Path, unreadable: list[str]) -> dict[str, Any]:
    """A JSON object with what SHAPES says of it; what cannot be read is said in `unreadable`."""
    found = rundir.read_json(path)
    if found is None and os.path.exists(path):
        unreadable.append(f"{path.name}: cannot be read as a JSON object; what it says is missing here.")
    kept = found or {}
    for key, shape in SHAPES[path.name].items():
        if kept.get(key) is not None and not isinstance(kept[key], shape):
            unreadable.append(f"{path.name}: {key} is a {type(kept[key]).__name__} in place of a {shape.__name__}, and left out.")
            kept.pop(key)
    return kept


def objects(content: Any) -> list[dict[str, Any]]:
    """Those items of a list that are objects."""
    return [item for item in content if isinstance(item, dict)] if isinstance(content, list) else []


def listed(content: Any) -> list[Any]:
    """A list; an empty one in place of anything else."""
    return content if isinstance(content, list) else []


def table(content: Any) -> dict[str, Any]:
    """An object; an empty one in place of anything else."""
    return content if isinstance(content, dict) else {}


def _yaml(path: Path, unreadable: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = yaml.load(path.read_bytes(), Loader=LOADER)
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        unreadable.append(f"config.yaml: cannot be read ({str(error).splitlines()[0]}).")
        return {}
    return found if isinstance(found, dict) else {}


def last_words(run: Run) -> list[Words]:
    """What the processes said last: of a failed run the one that failed first, where that is known; else of each."""
    folder = run.folder / "logs"
    first = next(iter(failures(run.folder)), None)
    files = sorted(file for file in folder.glob("*.log") if file.is_file())
    if first is not None:
        own = folder / f"rank{first['rank']}.log"
        chosen = [own] if own in files and own.stat().st_size else [f for f in files if f.stem == _training(run)] or files
    else:  # a process of ranks repeats in its own log what its ranks say
        chosen = [f for f in files if not f.stem.startswith("rank")] or files
    return [words for words in _words(chosen, first) if words.lines]


def _training(run: Run) -> str:
    """The name of the process group whose ranks write failures/."""
    kinds = {str(p.get("name")): p.get("kind") for p in objects(run.plan.get("processes"))}
    return next((name for name, kind in kinds.items() if kind not in ("server", "prepare", "verifier")), "trainers")


def _words(files: list[Path], first: dict[str, Any] | None) -> Iterator[Words]:
    for file in files:
        said = logs.last_words(file, count=1000)
        why = str(first["error"]) if first else logs.root_cause(said.lines)
        if why is None and said.exit_code is not None:
            why = logs.killed_by(-said.exit_code) if said.exit_code < 0 else f"exit code {said.exit_code}"
        shown = said.lines[-LAST_LINES:]
        name = file.stem + (f", rank {first['rank']}" if first else "")
        yield Words(name, str(Path("logs") / file.name), shown, why, meaning_of([why or ""]) or meaning_of(shown))
