"""Read the run directories of a report: finished, running, crashed or damaged."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.core import json_files
from launch.core.errors import UserError, near
from launch.core.json_files import is_number
from launch.inputs.paths import real_folder
from launch.plan import rundir

# A directory with one of these files is a run directory.
RUN_FILES = ("record.json", "plan.json", "config.yaml", "metrics.jsonl", "result.json")
EXAMPLE = "runs/<name>/<timestamp>-<id>"
PHASE = re.compile(r"[\w.-]{1,200}")  # the name of a phase's directory
MAX_PROBLEMS = 5  # problems of metrics.jsonl that a note lists; it only counts the others

Points = tuple[list[float], list[float]]  # steps and values


@dataclass(frozen=True)
class Metrics:
    """The readable lines of a metrics.jsonl in order, and the problems of the other lines."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}

    @functools.cached_property
    def keys(self) -> set[str]:
        return set[str]().union(*self.rows)

    @property
    def numeric_keys(self) -> list[str]:
        """Return the keys that have a number in some line, in order of appearance."""
        items = (item for row in self.rows for item in row.items())
        return list(dict.fromkeys(key for key, value in items if is_number(value)))

    def points(self, key: str) -> Points:
        """Return the steps and values of the lines where `key` is a number."""
        if key not in self.keys:
            return [], []
        values = [(row["step"], row.get(key)) for row in self.rows]
        points = [(float(step), float(value)) for step, value in values if is_number(value)]
        return [step for step, _ in points], [value for _, value in points]


@dataclass(frozen=True)
class Run:
    """The files of one run. A damaged file has no content here, and a note about it."""

    folder: Path
    name: str
    # The status in the record, or: lost (the launcher died), unknown (no record), waiting (not
    # started), gone (a phase that was reused from a run that was deleted later).
    status: str
    record: dict[str, Any]
    plan: dict[str, Any]
    result: dict[str, Any]
    config: dict[str, Any]  # the composition
    metrics: Metrics
    notes: list[str]  # problems of the files, and the warning of the result

    @property
    def exit_code(self) -> int | None:
        return self.record.get("exit_code")

    @property
    def warnings(self) -> list[str]:
        return [*self.notes, *map(str, self.plan.get("warnings") or [])]

    def get(self, *keys: str) -> Any:
        """Return a nested value of the composition, or None."""
        return value_at(self.config, *keys)

    def option(self, group: str) -> Any:
        """Return the option of a config group from the composition, or else from the plan."""
        return self.get(group, "name") or self.plan.get(group)


def value_at(content: Any, *keys: str) -> Any:
    """Return content[a][b]... for the keys a, b, ...; None if one of them is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def kind_of(folder: Path) -> str:
    """Return whether a directory is of a sweep, a pipeline or a run. Raises UserError otherwise."""
    # os.path does not raise for a name that is too long, unlike Path.is_file.
    if os.path.isfile(folder / "sweep.json"):
        return "sweep"
    if isinstance((json_files.read_json(folder / "record.json") or {}).get("phases"), dict):
        return "pipeline"
    if any(os.path.isfile(folder / name) for name in RUN_FILES):
        return "run"
    if os.path.isdir(folder):
        runs = [run for run in rundir.run_dirs(folder) if (run / "record.json").is_file()]
        hint = f" It contains {len(runs)} run(s), for example {runs[0]}." if runs else ""
    else:
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else []
        hint = near(folder.name, [path.name for path in siblings if path.is_dir()])
    raise UserError(f"{folder} is not the directory of a run.{hint} Use: {EXAMPLE}.")


def phases_of(folder: Path) -> list[Path]:
    """Return the directories of a pipeline's phases in order, including phases not started.

    A phase that was reused from a run that no longer exists is a dangling link.
    """
    names = (json_files.read_json(folder / "record.json") or {})["phases"].values()
    links = [folder / name for name in names if isinstance(name, str) and PHASE.fullmatch(name)]
    return [target if (target := real_folder(link)).is_dir() else link for link in links]


def read(folder: Path, name: str | None = None) -> Run:
    """Read a run directory. A missing or damaged file leaves its part of the Run empty."""
    notes: list[str] = []
    # Check the lock first. Otherwise a run that ends in between would have the status lost.
    was_locked = rundir.is_locked(folder)
    contents: list[dict[str, Any]] = []
    for file in ("record.json", "plan.json", "result.json"):
        content = json_files.read_json(folder / file)
        if content is None and os.path.exists(folder / file):
            notes.append(f"{file}: cannot be read as a JSON object, so its content is missing.")
        contents.append(content or {})
    record, plan, result = contents
    status = status_of(folder, record, was_locked)
    config, config_file = record.get("composition") or {}, folder / "config.yaml"
    if not config and config_file.is_file():
        try:
            config = yaml.safe_load(config_file.read_bytes())
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            notes.append(f"config.yaml: cannot be read ({str(error).splitlines()[0]}).")
    metrics = Metrics()
    try:
        metrics = read_metrics(folder / "metrics.jsonl", is_running=status == "running")
    except OSError as error:
        notes.append(f"metrics.jsonl: cannot be read ({error.strerror}).")
    if problems := metrics.problems:
        more = f"; and {len(problems) - MAX_PROBLEMS:,} more" * (len(problems) > MAX_PROBLEMS)
        count = f"{len(problems):,} of {len(problems) + len(metrics.rows):,} lines skipped"
        notes.append(f"metrics.jsonl: {count}: {'; '.join(problems[:MAX_PROBLEMS])}{more}.")
    notes += [str(result["warning"])] if "warning" in result else []
    name = name or f"{folder.parent.name}/{folder.name}"
    config = config if isinstance(config, dict) else {}
    return Run(folder, name, status, record, plan, result, config, metrics, notes)


def status_of(folder: Path, record: dict[str, Any], was_locked: bool) -> str:
    """Return a run's status, as in Run; `was_locked` must be read before `record`."""
    if folder.is_symlink() and not folder.exists():
        return "gone"
    if not record:
        return "unknown" if any((folder / name).exists() for name in RUN_FILES) else "waiting"
    if record.get("status") == "running" and not was_locked:
        return "lost"
    return str(record.get("status") or "unknown")


def read_metrics(path: Path, is_running: bool = False) -> Metrics:
    """Return the lines and problems of a metrics.jsonl, with NaN as a missing value."""
    return Metrics(*json_files.metrics_lines(path, is_running, constant=lambda _: None))
