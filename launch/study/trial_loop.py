"""Run the trials of a sweep as processes of this machine, each on its own GPUs."""

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
from launch.execution.logs import last_words
from launch.machine import masks
from launch.machine.detect import Host
from launch.machine.placement import MASK
from launch.plan import show
from launch.plan.process_env import ROOT
from launch.schema import Config
from launch.study import sweep_report
from launch.study.optuna_study import Source
from launch.study.trials import (
    Prepared,
    Trial,
    check_metric,
    check_metric_early,
    done_run,
    figures,
    newest_run,
    prepared,
    running_run,
    typed,
)

POLL_S = 0.2
RUN = ROOT / "launch/run.py"


@dataclass
class Running:
    trial: Trial
    ready: Prepared
    gpus: list[int]
    process: subprocess.Popen[bytes]
    log: Path
    metric_seen: bool = False


class Loop:
    """One sweep, from its source's first trial to the last, with overrides that all share."""

    def __init__(
        self, config: Config, folder: Path, shared: list[str], source: Source, host: Host
    ) -> None:
        self.config, self.sweep, self.folder = config, config.sweep, folder
        self.source, self.host = source, host
        # A Slurm trial has its metric only once its job has ended.
        waits = ["runtime.slurm.wait=true"] if config.runtime.name == "slurm" else []
        self.shared = [*shared, *waits]
        self.running: list[Running] = []
        self.waiting: tuple[Trial, Prepared] | None = None  # the next trial to start
        self.last_line = ""

    def run(self, stopping: list[int]) -> int:
        """Run all trials, or until `stopping` receives a signal.

        Raises UserError if the runs do not write the metric.
        """
        total = self.source.total
        self.say(f"{self.folder.name}: {total} trial(s); logs and table in {self.folder}")
        try:
            while not stopping and self._start_trials(stopping) | self._settle_ended():
                time.sleep(POLL_S)
        finally:
            self._stop()
        return EXIT_INTERRUPTED if stopping else self.exit_code()

    def exit_code(self) -> int:
        """Return 75 if a trial has not ended, else the first exit code that is not 0."""
        trials = sorted(self.source.known, key=lambda trial: trial.number)
        if any(trial.status in ("interrupted", "waiting") for trial in trials):
            return EXIT_INTERRUPTED
        return next((trial.exit_code for trial in trials if trial.exit_code), EXIT_DONE)

    def content(self) -> dict[str, Any]:
        """Return the content of sweep.json."""
        return sweep_report.as_object(
            self.folder, self.sweep, self.shared, self.source.known, self.source.total
        )

    def say(self, line: str) -> None:
        show.say(self.config, line)

    def _start_trials(self, stopping: list[int]) -> bool:
        """Start trials until one has to wait; return True if one has to."""
        while not stopping:
            if self.waiting is None:
                # A search learns from ended trials, so ask it only if there is room for another.
                if self.running and self._room(self.running[-1].ready) is None:
                    return True
                if (next_trial := self.source.next()) is None:
                    return False
                try:
                    request = Request([*self.shared, *next_trial.varied])
                    self.waiting = next_trial, prepared(request, self.host)
                except (UserError, HostError) as error:
                    self.settle(next_trial, "failed", error.exit_code, str(error))
                    continue
            trial, ready = self.waiting
            # An equal trial runs, or the launcher of a killed sweep is still saving.
            if any(r.ready.composition_hash == ready.composition_hash for r in self.running):
                return True
            if run_dir := running_run(ready):
                line = f"[{trial.number}] waits: another launcher is still executing {run_dir}"
                if line != self.last_line:
                    self.say(line)
                    self.last_line = line
                return True
            finished_dir = done_run(ready) if self.config.resume == "auto" else None
            if finished_dir:
                self._settle_done(trial, finished_dir)
            else:
                gpus = self._room(ready)
                if gpus is None:
                    return True
                log = self.folder / "logs" / f"trial{trial.number:04d}.log"
                num_parallel = min(self._at_once(ready), self.source.total)
                env = environment_of(ready, gpus, num_parallel, self.host)
                trial.status, trial.ran = "running", True
                self._write()  # before the start, so that a killed sweep knows what it began
                process = start([*self.shared, *trial.varied], env, log)
                self.running.append(Running(trial, ready, gpus, process, log))
                where = f" on GPU {','.join(map(str, gpus))}" if gpus else ""
                self.say(f"[{trial.number}] starts{where}: {sweep_report.short(trial.varied)}")
            self.waiting = None
        return False

    def _room(self, ready: Prepared) -> list[int] | None:
        """Return free GPUs for the trial ([] on a CPU); None if it has to wait."""
        if len(self.running) >= self._at_once(ready):
            return None
        sets = blocks(ready.gpus_here(self.host, planned=False), ready.num_gpus)
        busy = {gpu for running in self.running for gpu in running.gpus}
        return next((gpus for gpus in sets if busy.isdisjoint(gpus)), None)

    def _at_once(self, ready: Prepared) -> int:
        gpus = ready.gpus_here(self.host, planned=False)
        return at_once(gpus, ready.num_gpus, self.sweep.parallel)

    def _settle_ended(self) -> bool:
        """Record the result of ended trials; return whether any trial still runs."""
        for running in list(self.running):
            exit_code = running.process.poll()
            if exit_code is not None:
                self.running.remove(running)
                self.ended(running.trial, running.ready, running.log, exit_code)
            elif self.sweep.metric and not running.metric_seen:
                run_dir = running_run(running.ready)
                if run_dir and not has_phases(running.ready.config):
                    running.metric_seen = check_metric_early(self.sweep.metric, run_dir)
        return bool(self.running)

    def ended(self, trial: Trial, ready: Prepared, log: Path, exit_code: int) -> None:
        """Record a trial's result by its launcher's exit code, which is negative after a signal."""
        run_dir = newest_run(ready)
        trial.run_dir = str(run_dir) if run_dir else None
        if exit_code == EXIT_DONE and run_dir:
            self._settle_done(trial, run_dir)
        elif exit_code == EXIT_INTERRUPTED:
            self.settle(trial, "interrupted", exit_code)
        elif exit_code < 0:
            self.settle(trial, "failed", EXIT_FAILED, f"ended by signal {-exit_code}; {log}")
        else:
            result = json_files.read_json(run_dir / "result.json") if run_dir else None
            error = (result or {}).get("error") or "".join(last_words(log).lines[-1:])
            self.settle(trial, "failed", exit_code, f"{error} ({log})")

    def _settle_done(self, trial: Trial, run_dir: Path) -> None:
        """Record a trial with its metric. A search can only learn from a finite metric."""
        values, metric = figures(run_dir), self.sweep.metric
        trial.run_dir = str(run_dir)
        if metric is None:
            metric = sweep_report.usual(values)
        else:
            check_metric(metric, values)
            if values[metric] is None:
                self.settle(trial, "failed", EXIT_FAILED, f"{metric} is not a finite number")
                return
        trial.metric, trial.value = metric, values[metric] if metric else None
        self.settle(trial, "done", EXIT_DONE)

    def settle(self, trial: Trial, status: str, exit_code: int, why: str | None = None) -> None:
        trial.status, trial.exit_code, trial.why = status, exit_code, why
        self._write()
        value = "" if trial.value is None else f", {trial.metric} {trial.value:.6g}"
        before = "" if trial.ran or status != "done" else " before, not run again"
        reason = f": {why}" if why else ""
        self.say(f"[{trial.number}] {status}{before}{value}{reason}")

    def _stop(self) -> None:
        """Ask every trial to save, and wait for it, at most for runtime.stop_timeout_s."""
        if self.running:
            self.say(f"{len(self.running)} trial(s) save and stop")
        for running in self.running:
            with contextlib.suppress(ProcessLookupError):
                running.process.terminate()
        for running in self.running:
            running.process.wait()
            # Ignore its exit code, since the signal may have come before its launcher could handle
            # it. A finished trial is found next time.
            run_dir = newest_run(running.ready)
            running.trial.run_dir = str(run_dir) if run_dir else None
            self.settle(running.trial, "interrupted", EXIT_INTERRUPTED)

    def _write(self) -> None:
        json_files.write_json(self.folder / "sweep.json", self.content())


def blocks(gpus: list[int], size: int) -> list[list[int]]:
    """Return the GPUs of the trials of `size` GPUs that may run together; one trial needs no GPU.

    Blocks begin at multiples of `size`, so trials of one size leave no gaps and linked GPUs stay
    together.
    """
    if not 0 < size <= len(gpus):  # a trial's own launcher rejects more GPUs than there are
        return [[]]
    return [gpus[at : at + size] for at in range(0, len(gpus) - size + 1, size)]


def at_once(gpus: list[int], size: int, parallel: int | None) -> int:
    """Return how many trials of `size` GPUs run together; without GPUs, one by default."""
    return min(len(blocks(gpus, size)), parallel or len(gpus)) if size else parallel or 1


def environment_of(
    trial: Prepared, gpus: list[int], num_parallel: int, host: Host
) -> dict[str, str]:
    """Return a trial's variables on top of the user's environment: its GPUs, its share of cores."""
    config = trial.plans[0].config
    if config.runtime.name == "slurm":  # it runs on another machine, with other GPUs and cores
        return {}
    mask = MASK.get(config.hardware.vendor)
    env = {mask: ",".join(map(str, gpus))} if mask and gpus else {}
    if num_parallel > 1 and "OMP_NUM_THREADS" not in host.environ:
        ranks = max(process.num_ranks for plan in trial.plans for process in plan.processes)
        env["OMP_NUM_THREADS"] = str(max(1, host.num_cores // num_parallel // ranks))
    return env


def start(overrides: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `python launch/run.py` in its own session, so that Ctrl-C reaches only the sweep.

    However the sweep dies, the kernel then sends SIGTERM to its trials, which save and end with 75.
    """
    tie = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
    with log.open("ab") as file:
        settings = [f"{name}={value}" for name, value in env.items()]
        file.write(" ".join(["$", *settings, typed(overrides)]).encode() + b"\n")
        file.flush()
        return subprocess.Popen(
            [*tie, sys.executable, str(RUN), *overrides],
            env=masks.merged_environ(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
