"""One trial of a sweep: its overrides, what they compose to, and the run that it left, found by the hash of its composition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import environment, pipeline
from launch.chosen import with_choices
from launch.compose import compose, keys
from launch.environment import MASK
from launch.errors import UserError, near
from launch.files import rundir, sealed
from launch.files.check_files import check_files
from launch.machine.detect import Host
from launch.pipelines.cycle_choice import recorded
from launch.plan import Plan, composition_hash, has_phases, make_plan, prepare
from launch.schema import Config

# Figures of result.json that no line of metrics.jsonl holds.
AT_THE_END = ("steps", "num_problems", "step_s", "accuracy", "time_s")
OF_ROWS = ("most_", "least_")  # of a benchmark's rows the best by its own figure, as most_tflops
MEASURED_LATER = ("eval_", "best_", *OF_ROWS)  # of held-out rows: from the first save on; of rows: when all are measured


@dataclass
class Trial:
    """`status` is waiting, running, done, failed or interrupted; `varied` are the overrides that make it this trial."""

    number: int
    varied: list[str]
    status: str = "waiting"
    metric: str | None = None  # that was asked for, or else the first usual one that the run has
    value: float | None = None
    exit_code: int | None = None
    why: str | None = None  # it failed
    run_dir: str | None = None
    ran: bool = False  # by this command, not found done


@dataclass(frozen=True)
class Prepared:
    """What the overrides of a trial come to. `plans` has one for each phase of a pipeline."""

    config: Config
    plans: list[Plan]
    home: Path  # of its runs
    composition_hash: str

    @property
    def num_gpus(self) -> int:
        """GPUs of this host that it takes; none where its processes run elsewhere."""
        if self.plans[0].config.runtime.name not in ("local", "docker"):
            return 0
        return max(len({gpu for process in plan.processes for gpu in process.gpus}) for plan in self.plans)

    @property
    def num_ranks(self) -> int:
        return max(process.num_ranks for plan in self.plans for process in plan.processes)

    def gpus_here(self, host: Host, planned: bool) -> list[int]:
        """Indices that trials may be packed onto: the user's own mask, or all there are (`planned`: of the node that is planned for)."""
        hardware = self.plans[0].config.hardware
        mask = MASK.get(hardware.vendor)
        if mask is None:
            return []
        found = hardware.gpus_per_node if planned else len(host.gpus)
        given = host.environ.get(mask)
        return environment.visible_gpus(self.plans[0].config, host, len(given.split(",")) if given else found)


def prepared(overrides: list[str], host: Host) -> Prepared:
    """Compose and plan, as launch/run.py does; nothing of it depends on a trial before. Raises UserError, HostError."""
    config = compose(overrides)
    if has_phases(config):
        run_dir, _ = rundir.choose(config)
        plans = list(pipeline.make_plans(config, overrides, host, run_dir).values())
    else:
        config, warnings = prepare(config, keys(overrides))
        check_files(config, all_lines=False)  # its own launcher reads all
        run_dir, _ = rundir.choose(config)
        plans = [make_plan(with_choices(config, host, run_dir), host, run_dir, warnings)]
    return Prepared(config, plans, rundir.home_of(config), composition_hash(config))


def done_run(trial: Prepared) -> Path | None:
    """A run of this composition, on the data as it is now, that is done."""
    for folder, record in rundir.of_composition(trial.home, trial.composition_hash):
        if record.get("status") == "done" and not sealed.faults(record) and not rundir.changed_data(record):
            return folder
    return None


def running_run(trial: Prepared) -> Path | None:
    """A run of this composition that some launcher runs now, or still saves."""
    return next((folder for folder, _ in rundir.of_composition(trial.home, trial.composition_hash) if rundir.is_locked(folder)), None)


def newest_run(trial: Prepared) -> Path | None:
    return next((folder for folder, _ in rundir.of_composition(trial.home, trial.composition_hash)), None)


def figures(run_dir: Path) -> dict[str, float | None]:
    """The numbers that a run left: those of the last logged step, then those of its end. Of a pipeline: of its last phase, or of the
    evaluation that a RAFT at its end has chosen.

    None stands for a number that was not finite.
    """
    record = rundir.read_json(run_dir / "record.json") or {}
    phases = record.get("phases")
    chosen = {choice["last_evaluation"]: choice["evaluation"] for choice in recorded(record)}
    ended = list(phases.values())[-1] if phases else ""
    last = run_dir / chosen.get(ended, ended)
    lines = rundir.read_metrics(last / "metrics.jsonl")
    return _numbers({**(lines[-1] if lines else {}), **(rundir.read_json(last / "result.json") or {})})


def _numbers(row: dict[str, Any]) -> dict[str, float | None]:
    found = {k: v for k, v in row.items() if v is None or (isinstance(v, (int, float)) and not isinstance(v, bool))}
    finite = {k: v if v is None or math.isfinite(v) else None for k, v in found.items() if k != "exit_code"}
    return {**finite, **_of_rows(row)}


def _of_rows(result: dict[str, Any]) -> dict[str, float]:
    """Of a benchmark's result the best row's figure: most_<figure>, or least_<figure> of what is better where it is less."""
    figure, rows = result.get("figure"), result.get("rows")
    found = [row.get(figure) for row in rows] if figure and rows else []
    values = [value for value in found if isinstance(value, (int, float)) and math.isfinite(value)]
    if not values:
        return {}
    return {f"most_{figure}": max(values)} if result.get("higher_is_better", True) else {f"least_{figure}": min(values)}


def check_metric(metric: str, found: dict[str, float | None]) -> None:
    if metric not in found:
        raise UserError(f"sweep.metric={metric}: the run wrote no such figure.{near(metric, found)} It wrote: {', '.join(sorted(found))}.")


def check_metric_early(metric: str, run_dir: Path) -> bool:
    """The same as soon as a run has logged its first step, hours before its end. Returns whether it has."""
    lines = rundir.read_metrics(run_dir / "metrics.jsonl")
    if lines and metric not in AT_THE_END and not metric.startswith(MEASURED_LATER):
        check_metric(metric, _numbers(lines[0]))
    return bool(lines)
