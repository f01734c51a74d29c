"""Run the trials of a sweep as processes on this machine, each with exclusive GPUs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.config.identity import has_phases
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.execution.logs import tail
from launch.machine import masks
from launch.machine.detect import Host
from launch.machine.placement import MASK
from launch.plan import show
from launch.plan.next_steps import command_line
from launch.plan.process_env import ROOT
from launch.schema import Config
from launch.study import sweep_report
from launch.study.optuna_study import Source
from launch.study.trials import (
    PlannedTrial,
    Trial,
    check_metric,
    check_metric_early,
    plan_trial,
    run_metrics,
)

POLL_S = 0.2
RUN = ROOT / "launch/run.py"


@dataclass
class RunningTrial:
    """A trial whose launcher runs. `metric_seen` is set after an early check of its metric."""

    trial: Trial
    planned: PlannedTrial
    gpus: list[int]
    process: subprocess.Popen[bytes]
    log: Path
    metric_seen: bool = False


class Loop:
    """Run the trials of `source` with the `shared` overrides, and write sweep.json."""

    def __init__(
        self, config: Config, folder: Path, shared: list[str], source: Source, host: Host
    ) -> None:
        self.config, self.sweep, self.folder = config, config.sweep, folder
        self.source, self.host = source, host
        # The launcher has to wait for its Slurm job, which writes the metric.
        wait = ["runtime.slurm.wait=true"] if config.runtime.name == "slurm" else []
        self.shared = [*shared, *wait]
        self.running: list[RunningTrial] = []
        self.waiting: tuple[Trial, PlannedTrial] | None = None  # the next trial to start
        self.last_line = ""

    def run(self, stopping: list[int]) -> int:
        """Run trials until all have finished or `stopping` is not empty; return the exit code.

        Raises UserError if the runs do not write sweep.metric.
        """
        total = self.source.total
        self.say(f"{self.folder.name}: {total} trial(s); logs and table in {self.folder}")
        try:
            while not stopping and self._start_trials(stopping) | self._settle_exited():
                time.sleep(POLL_S)
        finally:
            self._stop()
        return EXIT_INTERRUPTED if stopping else self.exit_code()

    def exit_code(self) -> int:
        """Return 75 if a trial has not finished, else the first exit code other than 0, or 0."""
        trials = sorted(self.source.trials, key=lambda trial: trial.number)
        if any(trial.status in ("interrupted", "waiting") for trial in trials):
            return EXIT_INTERRUPTED
        return next((trial.exit_code for trial in trials if trial.exit_code), EXIT_DONE)

    def content(self) -> dict[str, Any]:
        return sweep_report.sweep_json(
            self.folder, self.sweep, self.shared, self.source.trials, self.source.total
        )

    def say(self, line: str) -> None:
        show.say(self.config, line)

    def _start_trials(self, stopping: list[int]) -> bool:
        """Start trials until one has to wait. Return whether one waits."""
        while not stopping:
            if self.waiting is None:
                # A search learns from finished trials, so request a trial only if it can start.
                if self.running and self._free_gpus(self.running[-1].planned) is None:
                    return True
                if (next_trial := self.source.next()) is None:
                    return False
                try:
                    request = Request([*self.shared, *next_trial.varied])
                    self.waiting = next_trial, plan_trial(request, self.host)
                except (UserError, HostError) as error:
                    self.settle(next_trial, "failed", error.exit_code, str(error))
                    continue
            trial, planned = self.waiting
            # Wait for a running trial with the same composition.
            if any(r.planned.composition_hash == planned.composition_hash for r in self.running):
                return True
            # The launcher of a sweep that was killed may still be saving.
            if run_dir := planned.running_run():
                line = f"[{trial.number}] waiting, because another launcher uses {run_dir}"
                if line != self.last_line:
                    self.say(line)
                    self.last_line = line
                return True
            finished_dir = planned.done_run() if self.config.resume == "auto" else None
            if finished_dir:
                self._settle_done(trial, finished_dir)
            else:
                gpus = self._free_gpus(planned)
                if gpus is None:
                    return True
                log = self.folder / "logs" / f"trial{trial.number:04d}.log"
                num_running = min(self._max_running(planned), self.source.total)
                env = trial_environment(planned, gpus, num_running, self.host)
                trial.status, trial.ran = "running", True
                self._write()  # before the start, so that a killed sweep can resume
                process = start_launcher([*self.shared, *trial.varied], env, log)
                self.running.append(RunningTrial(trial, planned, gpus, process, log))
                where = f" on GPU {','.join(map(str, gpus))}" if gpus else ""
                overrides = sweep_report.short_overrides(trial.varied)
                self.say(f"[{trial.number}] starting{where}: {overrides}")
            self.waiting = None
        return False

    def _free_gpus(self, planned: PlannedTrial) -> list[int] | None:
        """Return free GPUs for the trial, [] if it needs none, or None if it has to wait."""
        if len(self.running) >= self._max_running(planned):
            return None
        sets = gpu_blocks(planned.gpus_here(self.host, planned=False), planned.num_gpus)
        busy = {gpu for running in self.running for gpu in running.gpus}
        return next((gpus for gpus in sets if busy.isdisjoint(gpus)), None)

    def _max_running(self, planned: PlannedTrial) -> int:
        gpus = planned.gpus_here(self.host, planned=False)
        return num_parallel(gpus, planned.num_gpus, self.sweep.parallel)

    def _settle_exited(self) -> bool:
        """Record finished trials, check metrics of others; return whether a trial still runs."""
        for running in list(self.running):
            exit_code = running.process.poll()
            if exit_code is not None:
                self.running.remove(running)
                self.record_exit(running.trial, running.planned, running.log, exit_code)
            elif self.sweep.metric and not running.metric_seen:
                run_dir = running.planned.running_run()
                if run_dir and not has_phases(running.planned.config):
                    running.metric_seen = check_metric_early(self.sweep.metric, run_dir)
        return bool(self.running)

    def record_exit(self, trial: Trial, planned: PlannedTrial, log: Path, exit_code: int) -> None:
        """Record a trial by its launcher's exit code, which is negative after a signal."""
        run_dir = planned.newest_run()
        trial.run_dir = str(run_dir) if run_dir else None
        if exit_code == EXIT_DONE and run_dir:
            self._settle_done(trial, run_dir)
        elif exit_code == EXIT_INTERRUPTED:
            self.settle(trial, "interrupted", exit_code)
        elif exit_code < 0:
            self.settle(trial, "failed", EXIT_FAILED, f"killed by signal {-exit_code} ({log})")
        else:
            result = json_files.read_json(run_dir / "result.json") if run_dir else None
            error = (result or {}).get("error") or "".join(tail(log).lines[-1:])
            self.settle(trial, "failed", exit_code, f"{error} ({log})")

    def _settle_done(self, trial: Trial, run_dir: Path) -> None:
        """Record a finished trial and its metric. A trial whose metric is not finite has failed."""
        values, metric = run_metrics(run_dir), self.sweep.metric
        trial.run_dir = str(run_dir)
        if metric is None:
            metric = sweep_report.default_metric(values)
        else:
            check_metric(metric, values)
            if values[metric] is None:
                self.settle(trial, "failed", EXIT_FAILED, f"{metric} is not a finite number")
                return
        trial.metric, trial.value = metric, values[metric] if metric else None
        self.settle(trial, "done", EXIT_DONE)

    def settle(self, trial: Trial, status: str, exit_code: int, why: str | None = None) -> None:
        """Record the end of a trial in sweep.json and print it."""
        trial.status, trial.exit_code, trial.why = status, exit_code, why
        self._write()
        value = "" if trial.value is None else f", {trial.metric} {trial.value:.6g}"
        earlier = "" if trial.ran or status != "done" else " in an earlier command"
        reason = f": {why}" if why else ""
        self.say(f"[{trial.number}] {status}{earlier}{value}{reason}")

    def _stop(self) -> None:
        """Send SIGTERM to all trials, and wait until they have saved and exited."""
        if self.running:
            self.say(f"waiting for {len(self.running)} trial(s) to save and stop")
        for running in self.running:
            with contextlib.suppress(ProcessLookupError):
                running.process.terminate()
        for running in self.running:
            running.process.wait()
            # Ignore the exit code, because a launcher that is starting cannot handle the signal. If
            # the trial has finished, the next command finds its run.
            run_dir = running.planned.newest_run()
            running.trial.run_dir = str(run_dir) if run_dir else None
            self.settle(running.trial, "interrupted", EXIT_INTERRUPTED)

    def _write(self) -> None:
        json_files.write_json(self.folder / "sweep.json", self.content())


def gpu_blocks(gpus: list[int], size: int) -> list[list[int]]:
    """Divide `gpus` into blocks of `size` for trials in parallel; [[]] if no block fits.

    Blocks start at multiples of `size`, so that they leave no gaps and GPUs with links stay
    together.
    """
    if not 0 < size <= len(gpus):  # the trial's launcher rejects too many GPUs
        return [[]]
    return [gpus[i : i + size] for i in range(0, len(gpus) - size + 1, size)]


def num_parallel(gpus: list[int], size: int, parallel: int | None) -> int:
    """Return how many trials of `size` GPUs run in parallel; by default one trial without GPUs."""
    return min(len(gpu_blocks(gpus, size)), parallel or len(gpus)) if size else parallel or 1


def trial_environment(
    trial: PlannedTrial, gpus: list[int], num_parallel: int, host: Host
) -> dict[str, str]:
    """Return variables that restrict a trial to its GPUs and its share of the cores."""
    config = trial.plans[0].config
    if config.runtime.name == "slurm":  # the trial runs on another machine
        return {}
    mask = MASK.get(config.hardware.vendor)
    env = {mask: ",".join(map(str, gpus))} if mask and gpus else {}
    if num_parallel > 1 and "OMP_NUM_THREADS" not in host.environ:
        ranks = max(process.num_ranks for plan in trial.plans for process in plan.processes)
        env["OMP_NUM_THREADS"] = str(max(1, host.num_cores // num_parallel // ranks))
    return env


def start_launcher(overrides: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `python launch/run.py` in its own session, so that Ctrl-C reaches only the sweep.

    If the sweep dies, the kernel sends SIGTERM to its trials (--pdeathsig), which then save.
    """
    setpriv = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
    with log.open("ab") as file:
        settings = [f"{name}={value}" for name, value in env.items()]
        file.write(" ".join(["$", *settings, command_line("run", *overrides)]).encode() + b"\n")
        file.flush()
        return subprocess.Popen(
            [*setpriv, sys.executable, str(RUN), *overrides],
            env=masks.merged_environ(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
