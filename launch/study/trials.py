"""Describe a trial of a sweep: its overrides, its plans, and its runs by composition hash."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.config.compose import compose
from launch.config.identity import composition_hash, has_phases
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import UserError, near
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.placement import MASK
from launch.plan import rundir, sealed
from launch.plan.check_files import check_files
from launch.plan.planning import make_plan, prepare, with_choices
from launch.schema import Config
from launch.schema.cycle_choice import recorded
from launch.schema.plan import Plan
from launch.study import pipeline

# Metrics that only result.json contains, and not metrics.jsonl.
END_ONLY = ("steps", "num_problems", "step_s", "accuracy", "time_s")
ROW_PREFIXES = ("most_", "least_")  # prefixes of a benchmark's best value, such as most_tflops
# Held-out metrics are first logged with a checkpoint, and best values at the end.
MEASURED_LATER = ("eval_", "best_", *ROW_PREFIXES)


@dataclass
class Trial:
    """A trial as sweep.json stores it. `varied` are the overrides that only this trial has."""

    number: int
    varied: list[str]
    status: str = "waiting"  # later running, done, failed or interrupted
    metric: str | None = None  # sweep.metric, or default_metric() of the run
    value: float | None = None
    exit_code: int | None = None
    why: str | None = None  # the reason of a failure
    run_dir: str | None = None
    ran: bool = False  # whether this command ran it
    params: dict[str, Any] = field(default_factory=dict)  # Optuna's parameters of a search


@dataclass(frozen=True)
class PlannedTrial:
    """A trial's composition, its plans (one per phase), and the parent `home` of its runs."""

    config: Config
    plans: list[Plan]
    home: Path
    composition_hash: str

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs that the trial uses on this host; 0 if it runs elsewhere."""
        if self.plans[0].config.runtime.name not in ("local", "docker"):
            return 0
        return max(len({gpu for p in plan.processes for gpu in p.gpus}) for plan in self.plans)

    def gpus_here(self, host: Host, planned: bool) -> list[int]:
        """Return the GPUs that trials may use: the user's mask, or else all of this host.

        `planned` assumes a node of the planned hardware in place of this host.
        """
        config = self.plans[0].config
        mask = MASK.get(config.hardware.vendor)
        if mask is None:
            return []
        num_gpus = config.hardware.gpus_per_node if planned else len(host.gpus)
        if visible := host.environ.get(mask):
            num_gpus = len(visible.split(","))
        return placement.visible_gpus(config, host, num_gpus)

    def runs(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the runs of this composition with their records, newest first."""
        runs = rundir.runs_with_hash(self.home, self.composition_hash)
        return ((folder, record) for folder, record in runs if record is not None)

    def newest_run(self) -> Path | None:
        return next((folder for folder, _ in self.runs()), None)

    def running_run(self) -> Path | None:
        """Return a run that a launcher still uses, or None."""
        return next((folder for folder, _ in self.runs() if rundir.is_locked(folder)), None)

    def done_run(self) -> Path | None:
        """Return a finished run with unchanged data and record, or None."""
        for folder, record in self.runs():
            is_done = record.get("status") == "done" and not sealed.problems(record)
            if is_done and not rundir.changed_data(record):
                return folder
        return None


def plan_trial(request: Request, host: Host) -> PlannedTrial:
    """Compose and plan a trial as launch/run.py would. Raises UserError, HostError."""
    config = compose(request)
    if has_phases(config):
        run_dir, _ = rundir.choose(config)
        plans = list(pipeline.make_plans(config, request, host, run_dir).values())
    else:
        config, warnings = prepare(config, request.keys)
        check_files(config, all_lines=False)  # the trial's launcher checks all lines
        run_dir, _ = rundir.choose(config)
        plans = [make_plan(with_choices(config, host, run_dir), host, run_dir, warnings, request)]
    return PlannedTrial(config, plans, rundir.runs_dir(config), composition_hash(config))


def run_metrics(run_dir: Path) -> dict[str, float | None]:
    """Return the numbers in a run's last line of metrics.jsonl and in its result.json.

    For a pipeline, use its last phase, or the chosen evaluation of a final RAFT. A number that is
    not finite becomes None.
    """
    record = json_files.read_json(run_dir / "record.json") or {}
    last = list((record.get("phases") or {"": ""}).values())[-1]
    chosen = {choice["last_evaluation"]: choice["evaluation"] for choice in recorded(record)}
    phase = run_dir / chosen.get(last, last)
    lines = json_files.read_metrics(phase / "metrics.jsonl")
    result = json_files.read_json(phase / "result.json") or {}
    return _numbers({**(lines[-1] if lines else {}), **result})


def _numbers(row: dict[str, Any]) -> dict[str, float | None]:
    """Return a row's numbers. A benchmark's best row becomes most_<figure> or least_<figure>."""
    numbers = {
        name: value if value is None or math.isfinite(value) else None
        for name, value in row.items()
        if name != "exit_code" and (value is None or _is_number(value))
    }
    figure = row.get("figure")
    rows = (row.get("rows") or []) if figure else []
    if values := [v for r in rows if _is_number(v := r.get(figure)) and math.isfinite(v)]:
        more = row.get("higher_is_better", True)
        numbers[f"{'most' if more else 'least'}_{figure}"] = max(values) if more else min(values)
    return numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_metric(metric: str, values: dict[str, float | None]) -> None:
    """Raise UserError if `values` of a run do not contain the metric."""
    if metric not in values:
        raise UserError(
            f"sweep.metric={metric}: the run has no such metric.{near(metric, values)} "
            f"It has {', '.join(sorted(values))}."
        )


def check_metric_early(metric: str, run_dir: Path) -> bool:
    """Check the metric after the first logged step, because the run may take hours.

    Return whether a step has been logged. Raises UserError if the metric is missing.
    """
    lines = json_files.read_metrics(run_dir / "metrics.jsonl")
    if lines and metric not in END_ONLY and not metric.startswith(MEASURED_LATER):
        check_metric(metric, _numbers(lines[0]))
    return bool(lines)
