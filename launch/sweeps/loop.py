"""Trials as processes of this machine: started where they fit, watched, told to the source, stopped together."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from launch.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.files import rundir
from launch.machine.detect import Host
from launch.plan import has_phases
from launch.schema import Config
from launch.supervision.logs import last_words
from launch.sweeps import report as sweep_report
from launch.sweeps.pool import TrialProcess, at_once, environment_of, pack
from launch.sweeps.study import Source
from launch.sweeps.trials import (
    Prepared,
    Trial,
    check_metric,
    check_metric_early,
    done_run,
    figures,
    newest_run,
    prepared,
    running_run,
)

POLL_S = 0.2


@dataclass
class Running:
    trial: Trial
    prepared: Prepared
    gpus: list[int]
    process: TrialProcess
    log: Path
    metric_seen: bool = False


class Loop:
    """One sweep from its source's first trial to its last. `shared` are the overrides of every trial."""

    def __init__(self, config: Config, folder: Path, shared: list[str], source: Source, host: Host) -> None:
        # A trial's figure is there when its job has ended.
        waits = ["runtime.slurm.wait=true"] if config.runtime.name == "slurm" else []
        self.config, self.sweep, self.folder, self.source, self.host = config, config.sweep, folder, source, host
        self.shared = [*shared, *waits]
        self.running: list[Running] = []
        self.next: tuple[Trial, Prepared] | None = None  # the trial that waits for its turn
        self.said = ""

    def run(self, stopping: list[int]) -> int:
        """`stopping` receives signals. Raises UserError where the runs do not write the metric."""
        sweep_report.say(self.config, f"{self.folder.name}: {self.source.total} trial(s); logs and table in {self.folder}")
        try:
            while not stopping and self._start_those_that_fit(stopping) | self._look():
                time.sleep(POLL_S)
        finally:
            self._stop()
        return EXIT_INTERRUPTED if stopping else self.exit_code()

    def exit_code(self) -> int:
        """75 where a trial has not come to its end, else the first that is not 0."""
        trials = sorted(self.source.known, key=lambda trial: trial.number)
        if any(trial.status in ("interrupted", "waiting") for trial in trials):
            return EXIT_INTERRUPTED
        return next((trial.exit_code for trial in trials if trial.exit_code), EXIT_DONE)

    def take_all(self) -> list[tuple[Trial, Prepared]]:
        """Every trial that is to be run; the others are settled."""
        taken = []
        while self._take():
            assert self.next is not None
            if not self._was_done(*self.next):
                taken.append(self.next)
            self.next = None
        return taken

    def _start_those_that_fit(self, stopping: list[int]) -> bool:
        """Whether a trial is left that waits."""
        while not stopping:
            # A search learns from what has ended, so it is asked only when there is room for a trial like the last.
            if self.next is None and self.running and self._room(self.running[-1].prepared) is None:
                return True
            if self.next is None and not self._take():
                return False
            assert self.next is not None
            trial, found = self.next
            if self._waits(trial, found) or not self._start(trial, found):
                return True
            self.next = None
        return False

    def _take(self) -> bool:
        """The next trial that is to be run; those that are refused, or done already, are settled on the way."""
        while trial := self.source.next():
            try:
                found = prepared([*self.shared, *trial.varied], self.host)
            except (UserError, HostError) as error:
                self.settle(trial, "failed", error.exit_code, str(error))
                continue
            self.next = trial, found
            return True
        return False

    def _waits(self, trial: Trial, found: Prepared) -> bool:
        """For a trial of the same values beside it, or for a launcher that a killed sweep has left and that still saves."""
        if any(r.prepared.composition_hash == found.composition_hash for r in self.running):
            return True
        elsewhere = running_run(found)
        if elsewhere:
            self._say_once(f"[{trial.number}] waits: another launcher still has {elsewhere}")
        return elsewhere is not None

    def _start(self, trial: Trial, found: Prepared) -> bool:
        """False where there is no room yet."""
        if self._was_done(trial, found):
            return True
        block = self._room(found)
        if block is None:
            return False
        log = self.folder / "logs" / f"trial{trial.number:04d}.log"
        together = min(self._together(found), self.source.total)
        env = environment_of(found, block, together, self.host)
        process = TrialProcess([*self.shared, *trial.varied], env, log)
        self.running.append(Running(trial, found, block, process, log))
        trial.status, trial.ran = "running", True
        where = f" on GPU {','.join(map(str, block))}" if block else ""
        sweep_report.say(self.config, f"[{trial.number}] starts{where}: {sweep_report.short(trial.varied)}")
        self._write()
        return True

    def _together(self, found: Prepared) -> int:
        return at_once(found.gpus_here(self.host, planned=False), found.num_gpus, self.sweep.parallel)

    def _room(self, found: Prepared) -> list[int] | None:
        """The GPUs that such a trial may have now (none on a CPU); None where it has to wait."""
        gpus, wanted = found.gpus_here(self.host, planned=False), found.num_gpus
        if len(self.running) >= self._together(found):
            return None
        if not 0 < wanted <= len(gpus):  # of more than there are its own launcher says so
            return []
        return pack(gpus, [gpu for running in self.running for gpu in running.gpus], wanted)

    def _was_done(self, trial: Trial, found: Prepared) -> bool:
        done = done_run(found) if self.config.resume == "auto" else None
        if done:
            self._done(trial, done)
        return done is not None

    def _look(self) -> bool:
        """Settle what has ended. Whether anything still runs."""
        for running in list(self.running):
            exit_code = running.process.poll()
            if exit_code is None:
                self._check_metric(running)
                continue
            self.running.remove(running)
            self.ended(running.trial, running.prepared, running.log, exit_code)
        return bool(self.running)

    def _check_metric(self, running: Running) -> None:
        if self.sweep.metric is None or running.metric_seen or has_phases(running.prepared.config):
            return
        run_dir = running_run(running.prepared)
        running.metric_seen = run_dir is not None and check_metric_early(self.sweep.metric, run_dir)

    def ended(self, trial: Trial, found: Prepared, log: Path, exit_code: int) -> None:
        """Settle a trial whose launcher ended with this exit code (below 0: by a signal)."""
        run_dir = newest_run(found)
        trial.run_dir = str(run_dir) if run_dir else None
        if exit_code == EXIT_DONE and run_dir:
            self._done(trial, run_dir)
        elif exit_code == EXIT_INTERRUPTED:
            self.settle(trial, "interrupted", exit_code, None)
        elif exit_code < 0:
            self.settle(trial, "failed", EXIT_FAILED, f"ended by signal {-exit_code}; {log}")
        else:
            error = (rundir.read_json(run_dir / "result.json") or {}).get("error") if run_dir else None
            said = error or next(iter(reversed(last_words(log).lines)), "")
            self.settle(trial, "failed", exit_code, f"{said} ({log})")

    def _done(self, trial: Trial, run_dir: Path) -> None:
        """With its metric, without which a search learns nothing from it."""
        found, metric = figures(run_dir), self.sweep.metric
        trial.run_dir = str(run_dir)
        if metric is None:
            metric = sweep_report.usual(found)
        else:
            check_metric(metric, found)
            if found[metric] is None:
                self.settle(trial, "failed", EXIT_FAILED, f"{metric} is not a finite number")
                return
        trial.metric, trial.value = metric, found[metric] if metric else None
        self.settle(trial, "done", EXIT_DONE, None)

    def settle(self, trial: Trial, status: str, exit_code: int, why: str | None) -> None:
        trial.status, trial.exit_code, trial.why = status, exit_code, why
        self._write()  # before the journal, which it explains
        self.source.tell(trial)
        value = "" if trial.value is None else f", {trial.metric} {trial.value:.6g}"
        before = "" if trial.ran or status != "done" else " before, not run again"
        sweep_report.say(self.config, f"[{trial.number}] {status}{before}{value}{f': {why}' if why else ''}")

    def _stop(self) -> None:
        """Ask every trial to save, and wait until all have: how long one may take its own launcher bounds (runtime.stop_timeout_s)."""
        if self.running:
            sweep_report.say(self.config, f"{len(self.running)} trial(s) save and stop")
        for running in self.running:
            with contextlib.suppress(ProcessLookupError):
                running.process.ask_to_stop()
        while self.running:
            for running in list(self.running):
                exit_code = running.process.poll()
                if exit_code is not None:
                    self.running.remove(running)
                    # Whatever its launcher says: the signal may have come before it could answer. One that is done is found done next time.
                    run_dir = newest_run(running.prepared)
                    running.trial.run_dir = str(run_dir) if run_dir else None
                    self.settle(running.trial, "interrupted", EXIT_INTERRUPTED, None)
            time.sleep(POLL_S / 4)

    def _write(self) -> None:
        content = sweep_report.as_object(self.folder, self.sweep, self.shared, self.source.known, self.source.total)
        rundir.write_json(self.folder / "sweep.json", content)

    def _say_once(self, line: str) -> None:
        if line != self.said:
            sweep_report.say(self.config, line)
            self.said = line
