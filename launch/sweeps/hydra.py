"""A grid through one of Hydra's own launchers (hydra/launcher=submitit_slurm): a job for each trial, on machines that it finds."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf.errors import OmegaConfBaseException

from launch.compose import CONF, freed, translate
from launch.environment import ROOT
from launch.errors import EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.files import rundir
from launch.machine.detect import Host
from launch.schema import Config
from launch.sweeps import report as sweep_report
from launch.sweeps.loop import Loop
from launch.sweeps.pool import TrialProcess
from launch.sweeps.study import Source


@dataclass(frozen=True)
class Job:
    """What Hydra calls in a job's process. It starts a launcher of its own, so that nothing depends on Hydra's state there."""

    folder: Path
    trials: dict[int, list[str]]  # by Hydra's number of the job

    def __call__(self, _composed: object) -> int:
        number = HydraConfig.get().job.num
        process = TrialProcess(self.trials[number], {}, log_of(self.folder, number))
        exit_code = process.child.wait()
        rundir.write_json(exit_file(self.folder, number), {"exit_code": exit_code})
        return exit_code


def log_of(folder: Path, number: int) -> Path:
    return folder / "logs" / f"job{number:04d}.log"


def exit_file(folder: Path, number: int) -> Path:
    return folder / "jobs" / f"{number}.json"


def run(config: Config, folder: Path, shared: list[str], launcher: list[str], source: Source, host: Host) -> int:
    """Submit every trial that is not done, wait, and settle them. Returns the first exit code not 0."""
    loop = Loop(config, folder, shared, source, host)
    taken = loop.take_all()
    for job in range(len(taken)):
        exit_file(folder, job).unlink(missing_ok=True)
    if taken:
        jobs = {job: [*shared, *trial.varied] for job, (trial, _) in enumerate(taken)}
        sweep_report.say(config, f"{folder.name}: {len(taken)} job(s) by {launcher[0]}; logs and table in {folder}")
        for trial, _ in taken:
            trial.status, trial.ran = "running", True
        _launch(folder, launcher, jobs)
    for job, (trial, found) in enumerate(taken):
        kept = rundir.read_json(exit_file(folder, job))
        if kept is None:
            loop.settle(trial, "failed", EXIT_FAILED, f"its job ended before its launcher; {folder / '.submitit'} has its log")
        else:
            loop.ended(trial, found, log_of(folder, job), int(kept["exit_code"]))
    return loop.exit_code()


def _launch(folder: Path, launcher: list[str], jobs: dict[int, list[str]]) -> None:
    """Through Hydra's launcher. Raises UserError for one that Hydra refuses, HostError where it cannot submit."""
    # The job's Python looks for launch/ where this one found it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["HYDRA_FULL_ERROR"] = "1"
    trials = [freed(overrides) for overrides in jobs.values()]
    shared = [o for o in trials[0] if all(o in trial for trial in trials)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = [*shared, *launcher, f"hydra.sweep.dir={_quoted(folder.absolute())}"]
        try:
            composed = loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
            HydraConfig.instance().set_config(composed)
            started: Any = Plugins.instance().instantiate_launcher(
                HydraContext(loader, _no_callbacks()), Job(folder.absolute(), jobs), composed
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise _refused(launcher, error) from error
        try:
            started.launch(trials, initial_job_idx=0)
        except KeyboardInterrupt:
            print("interrupted: jobs that were submitted go on; cancel them, or wait, before the same command", file=sys.stderr)
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:  # a scheduler's words, or a job that was lost: the plugins raise types of their own
            if not any(exit_file(folder, job).exists() for job in jobs):
                raise HostError(f"{launcher[0]}: {' '.join(str(error).split())[:2000]}") from error


def _no_callbacks() -> Any:
    from hydra._internal.callbacks import Callbacks  # a job asks for them; we have none

    return Callbacks()


def _refused(launcher: list[str], error: Exception) -> UserError:
    said = str(translate(error)).partition(" Config search path")[0]
    if "hydra/launcher" in said:
        said += " (hydra-submitit-launcher, of containers/cpu/requirements.in, brings the submitit ones)"
    return UserError(f"{launcher[0]}: {said}.")


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "\\'") + "'"
