"""Run a grid through a launcher of Hydra (hydra/launcher=submitit_slurm), one job per trial."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf.errors import OmegaConfBaseException

from launch.config.request import Request
from launch.config.wording import CONF, translate
from launch.core import json_files
from launch.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.plan.process_env import ROOT
from launch.study import pool
from launch.study.trial_loop import Loop


@dataclass(frozen=True)
class Job:
    """The callable that Hydra runs in a job's process.

    It starts a separate process, so that a trial does not depend on Hydra's state there.
    """

    folder: Path
    trials: dict[int, list[str]]  # by Hydra's job number

    def __call__(self, _composed: object) -> int:
        number = HydraConfig.get().job.num
        exit_code = pool.start(self.trials[number], {}, self.log(number)).wait()
        json_files.write_json(self.exit_file(number), {"exit_code": exit_code})
        return exit_code

    def log(self, number: int) -> Path:
        return self.folder / "logs" / f"job{number:04d}.log"

    def exit_file(self, number: int) -> Path:
        return self.folder / "jobs" / f"{number}.json"


def run(loop: Loop, launcher: list[str]) -> int:
    """Submit every trial that is not done, wait, and settle them. Return the sweep's exit code."""
    pending = []
    while ready := loop.take():
        if not loop.settled_before(*ready):
            pending.append(ready)
    overrides = {n: [*loop.shared, *trial.varied] for n, (trial, _) in enumerate(pending)}
    job = Job(loop.folder.absolute(), overrides)
    if pending:
        for number, (trial, _) in enumerate(pending):
            job.exit_file(number).unlink(missing_ok=True)
            trial.status, trial.ran = "running", True
        name = loop.folder.name
        loop.say(f"{name}: {len(pending)} job(s) by {launcher[0]}; logs and table in {loop.folder}")
        _launch(job, launcher)
    for number, (trial, prepared) in enumerate(pending):
        result = json_files.read_json(job.exit_file(number))
        if result is None:
            why = f"its job ended before its launcher; see {loop.folder / '.submitit'}"
            loop.settle(trial, "failed", EXIT_FAILED, why)
        else:
            loop.ended(trial, prepared, job.log(number), int(result["exit_code"]))
    return loop.exit_code()


def _launch(job: Job, launcher: list[str]) -> None:
    """Submit the trials. Raises UserError if Hydra rejects the launcher, HostError if it fails."""
    # The job's Python looks for launch/ where this one found it.
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["HYDRA_FULL_ERROR"] = "1"
    trials = [Request(overrides).checked() for overrides in job.trials.values()]
    shared = [o for o in trials[0] if all(o in trial for trial in trials)]
    sweep_dir = str(job.folder).replace("'", "\\'")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = [*shared, *launcher, f"hydra.sweep.dir='{sweep_dir}'"]
        try:
            composed = loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
            HydraConfig.instance().set_config(composed)
            hydras: Any = Plugins.instance().instantiate_launcher(
                HydraContext(loader, Callbacks()), job, composed
            )
        except (HydraException, OmegaConfBaseException) as error:
            why = str(translate(error)).partition(" Config search path")[0]
            if "hydra/launcher" in why:
                why += " (containers/cpu/requirements.in has hydra-submitit-launcher)"
            raise UserError(f"{launcher[0]}: {why}.") from error
        try:
            hydras.launch(trials, initial_job_idx=0)
        except KeyboardInterrupt:
            print(
                "interrupted: submitted jobs continue; cancel them or let them end, then repeat "
                "the same command",
                file=sys.stderr,
            )
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:  # the plugins raise their own types
            if not any(job.exit_file(number).exists() for number in job.trials):
                raise HostError(f"{launcher[0]}: {' '.join(str(error).split())[:2000]}") from error
