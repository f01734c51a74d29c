"""Run phases in order, each in its own directory under one parent; models feed later phases.

A pipeline that stopped resumes at the phase in which it stopped. One that was changed keeps the
phases before the change (launch/study/keeping.py). method=raft is a pipeline too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.config.compose import compose
from launch.config.identity import composition, composition_hash, identity, identity_of
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, HostError, UserError
from launch.execution import record
from launch.execution.execute import STATUS, check_host, execute, signals
from launch.inputs.paths import real_folder
from launch.machine import detect
from launch.plan import rundir, sealed, show
from launch.plan.check_files import check_files
from launch.plan.planning import make_plan, prepare, with_choices
from launch.plan.views import outside, pipeline_json, shared_warnings
from launch.rules.phases import check_phases
from launch.rules.values import check_value
from launch.schema import Config, Data, Phase
from launch.schema.checked import NAME
from launch.schema.data import Curriculum
from launch.schema.enums import Find, Format, Init, Mode
from launch.schema.plan import Plan
from launch.study import cycles, keeping, phase_curves
from launch.study.cycles import CyclePhase


def run(config: Config, request: Request) -> int:
    """Plan every phase, then run them in order; return the exit code."""
    run_dir, resumed = rundir.choose(config)
    pipeline = Pipeline(config, request, detect.host(sys.executable), run_dir)
    left = rundir.left(config, run_dir)
    plans = pipeline.plans()
    if resumed and (changed := changed_phases(run_dir, plans)):
        what = "; ".join(changed)
        if config.resume != "auto":
            raise UserError(
                f"resume={config.resume}: phases changed since that run began: {what}. Use: "
                "resume=auto for another run that keeps the phases before the change, or "
                "resume=never for a fresh one."
            )
        show.say(config, f"Not resuming {run_dir}: phases changed since it began: {what}.")
        run_dir, resumed = run_dir.parent / rundir.fresh_name(), False
        pipeline.run_dir = run_dir
        plans = pipeline.plans()
    if config.resume == "auto" and not resumed:
        reuse = keeping.find(config, run_dir.parent, plans, pipeline.plans)
        if reuse:
            show.say(config, keeping.summary(reuse))
            plans = pipeline.plans(reuse.folders) if reuse.folders else plans
    warnings = [*left, *shared_warnings(plans)]
    if config.mode == Mode.plan:
        here = plans.keys() - outside(run_dir, plans).keys()
        to_run = [plan for name, plan in plans.items() if name in here and not plan.is_left_out]
        # Warnings are shown once, at the end.
        silent = [dataclasses.replace(plan, warnings=[]) for plan in to_run]
        shown = pipeline_json(run_dir.parent.name, run_dir, plans)
        show.show(config, lambda: {**shown, "warnings": [*left, *shown["warnings"]]}, *silent)
        show.say_warnings(config, warnings)
        return EXIT_DONE
    images = {}
    for name, plan in plans.items():  # check all before the first phase starts
        if not plan.is_left_out and not _is_done(plan.run_dir):
            with _named(name):
                images[name] = check_host(plan, pipeline.host)
    show.say_warnings(config, warnings)
    rundir.make(run_dir)
    with rundir.locked(run_dir), signals() as stopping:
        keeping.link(run_dir, plans)
        if resumed:
            show.say(config, f"Resuming {run_dir}; resume=never starts afresh.")
        return pipeline.run(plans, images, stopping)


def changed_phases(run_dir: Path, plans: dict[str, Plan]) -> list[str]:
    """Return how phases of `run_dir` that have begun differ from `plans`.

    The pipeline's own composition does not show this, since conf/ may have changed a phase's
    method.
    """
    then = (json_files.read_json(run_dir / "record.json") or {}).get("phases") or {}
    now = {name: plan.run_dir.name for name, plan in plans.items()}
    # Since the record was written, more cycles may have been left out.
    if not _folders(plans).items() <= then.items() <= now.items():
        return rundir.differences(then, now, "phases")
    changes, reused_dirs = [], outside(run_dir, plans)
    for name, plan in plans.items():
        if (
            why := keeping.fault(plan.run_dir)
            if name in reused_dirs
            else rundir.untrusted(plan.run_dir)
        ):
            changes.append(f"{name}: {why}")
        elif begun := json_files.read_json(plan.run_dir / "record.json"):
            old, new = identity(begun["composition"]), identity_of(plan.config)
            changes += rundir.differences(old, new, name)
    return changes


def make_plans(
    config: Config, request: Request, host: detect.Host, run_dir: Path
) -> dict[str, Plan]:
    """Return the plan of every phase by name, in order. Raises UserError, HostError."""
    return Pipeline(config, request, host, run_dir).plans()


def _is_done(folder: Path) -> bool:
    return (json_files.read_json(folder / "record.json") or {}).get("status") == "done"


def _folders(plans: dict[str, Plan]) -> dict[str, str]:
    """Return the directory names of the phases that run."""
    return {name: plan.run_dir.name for name, plan in plans.items() if not plan.is_left_out}


@contextlib.contextmanager
def _named(phase: str) -> Iterator[None]:
    """Prefix errors with the name of the phase that they are about."""
    try:
        yield
    except (UserError, HostError) as error:
        if not phase or str(error).startswith("phase "):
            raise
        raise type(error)(f"phase {phase}: {error}") from error


def refuse_keys_of_one_run(config: Config, why: str, **others: bool) -> None:
    """Reject keys that only one run reads; `others` are more values by key. Raises UserError."""
    keys = {"data.preview": bool(config.data.preview), "find": config.find != Find.none, **others}
    for key, is_set in keys.items():
        if is_set:
            raise UserError(f"{key} is for one run, and {why}")


def input_data(run_dir: Path, plans: list[Plan]) -> dict[str, Any]:
    """Return the content of all phases' data and adapters, except the outputs of other phases.

    A pipeline resumes only with the data with which it began.
    """
    paths = {p for plan in plans for p in record.data_paths(plan)}
    paths |= {p for plan in plans for p in record.adapter_files(plan.config)}
    own = {run_dir, *(plan.run_dir for plan in plans)}
    return record.contents(path for path in sorted(paths) if own.isdisjoint(Path(path).parents))


class Pipeline:
    """Phases of a composition in `run_dir`. Keeps composed phases, because cycles repeat them."""

    def __init__(self, config: Config, request: Request, host: detect.Host, run_dir: Path) -> None:
        self.config, self.request, self.host, self.run_dir = config, request, host, run_dir
        self.others = request.without("experiment")
        self.experiment = [o for o in request if o not in self.others]
        self.composed: dict[tuple[str, ...], Config] = {}
        self.data: dict[str, Any] = {}  # content of the input files when the pipeline began
        self.ended: dict[str, Any] = {}  # results of phases that have ended, for format=json
        check_value("name", config.name, NAME)  # each phase, which is checked later, has its own
        check_phases(config.phases)

    def compose(self, phase: Phase) -> Config:
        """Compose the experiment, the phase's overrides, then the command line's, which win.

        The caller may change the result. Raises UserError.
        """
        typed, groups = self.others, []
        if isinstance(phase, CyclePhase):  # it already has RAFT's method and arguments
            typed, groups = Request(cycles.without_method(self.others)), phase.groups
        overrides = (*self.experiment, *phase.overrides, *typed, *groups)
        if overrides not in self.composed:
            config = compose([*overrides, "phases=[]"], typed=typed)
            why = "a pipeline has several. Leave it out, or start each phase by itself."
            slurm = {"runtime=slurm": config.runtime.name == "slurm"}
            refuse_keys_of_one_run(config, f"{why} In a Slurm job, use runtime=local.", **slurm)
            self.composed[overrides] = config
        return copy.deepcopy(self.composed[overrides])

    def plans(self, reused_dirs: Mapping[str, Path] | None = None) -> dict[str, Plan]:
        """Return the plan of every phase by name, in order. Raises UserError, HostError.

        `reused_dirs` maps phases to their directories in an earlier run, in addition to those that
        `run_dir` links to.
        """

        def of_phase(phase: Phase) -> Config:
            """Return a phase's composition. A RAFT, which has phases, is checked and scaled."""
            with _named(phase.name):
                composed = self.compose(phase) if self.config.phases else self.config
                if not composed.method.has_cycles:
                    return composed
                return prepare(dataclasses.replace(composed, effective_batch=None))[0]

        phases = self.config.phases or [Phase(name="")]
        folders = {
            phase.name: real_folder(self.run_dir / f"{number}_{phase.name}")
            for number, phase in enumerate(cycles.expand(phases, of_phase, {}), start=1)
        } | dict(reused_dirs or {})
        accuracies: dict[str, float] = {}
        for name, folder in folders.items():
            result = json_files.read_json(folder / "result.json") if _is_done(folder) else None
            if isinstance(accuracy := (result or {}).get("accuracy"), float):
                accuracies[name] = accuracy
        plans = {}
        for phase in cycles.expand(phases, of_phase, accuracies):
            with _named(phase.name):
                plans[phase.name] = self._plan(phase, folders)
        return plans

    def _plan(self, phase: Phase, folders: dict[str, Path]) -> Plan:
        cycle = phase if isinstance(phase, CyclePhase) else None
        folder, composed, keys = folders[phase.name], self.compose(phase), self.others.keys
        composed.name = f"{folder.parent.parent.name}-{phase.name}"
        path = composed.model.path
        source = str(folders[phase.model_from] / "model") if phase.model_from else path
        if not self.config.smoke:
            composed.model.path = source
        if phase.data_from:
            composed.data = cycles.samples_of(folders[phase.data_from], composed)
        if phase.results_from:
            composed.method.args["results_from"] = str(folders[phase.results_from])
        if cycle:
            cycles.apply(composed, cycle)
            if cycle.pass_rates_from and composed.data.curriculum == Curriculum.adaptive:
                composed.data.pass_rates = str(folders[cycle.pass_rates_from] / "result.json")
            keys = [*keys, *cycles.of_part(cycle.part, keys)]
        prepared, warnings = prepare(composed, keys)
        if cycle and cycle.chosen and cycle.part == "train":
            warnings = [*warnings, *cycle.chosen.warnings()]
        # smoke=true has just scaled this phase's model; the earlier phase's is as small.
        prepared.model.path = source
        prepared = with_choices(prepared, self.host, folder)
        plan = make_plan(prepared, self.host, folder, warnings, self.request)
        there = copy.deepcopy(prepared)  # without the outputs of earlier phases
        if phase.model_from:
            there.model.path, there.model.init = None, Init.pretrained
        if phase.data_from:
            there.data = Data(kind="none")
        if cycle and cycle.pass_rates_from:
            there.data.pass_rates = None
        if phase.results_from:
            del there.method.args["results_from"]
        check_files(there, all_lines=self.config.mode == Mode.run)
        return dataclasses.replace(plan, chosen=cycle.chosen) if cycle else plan

    def run(
        self,
        plans: dict[str, Plan],
        images: Mapping[str, dict[str, Any] | None],
        stopping: list[int],
    ) -> int:
        """Run the phases that are not done, and return the exit code.

        `images` is what check_host returned for each phase.
        """
        config, exit_code = self.config, EXIT_DONE
        self.data = input_data(self.run_dir, list(plans.values()))
        self._write(plans, "running")
        try:
            for phase in plans:  # choosing a cycle replaces the plans, but not their names
                plan = plans[phase]
                if plan.is_left_out:
                    continue
                if _is_done(plan.run_dir):
                    self.ended[phase] = show.end_json(plan, EXIT_DONE)
                    show.say(config, f"{plan.name}: done already")
                    continue
                if stopping:
                    exit_code = EXIT_INTERRUPTED
                    why = f"interrupted before phase {phase}; the same command resumes"
                    show.say(config, f"{self.run_dir.parent.name}: {why}")
                    break
                model = plan.config.model.path or plan.config.model.name
                name = f"{plan.run_dir.name}: {plan.config.method.name}"
                show.say(config, f"\nphase {name} of {model}")
                with _named(phase):
                    exit_code = execute(plan, self.host, images[phase], self.run_dir.name, stopping)
                self.ended[phase] = show.end_json(plan, exit_code)
                show.say_end(config, plan, exit_code)
                if exit_code != EXIT_DONE:
                    break
                if plan.chosen and plan.config.method.measures_model:
                    plans = self.plans()
                    self._write(plans, "running")
        except (UserError, HostError) as error:
            # Planning again may miss a data file.
            self._end(plans, error.exit_code)
            raise
        self._end(plans, exit_code)
        return exit_code

    def _end(self, plans: dict[str, Plan], exit_code: int) -> None:
        """Write the last record, and show what was learned or the ended phases."""
        self._write(plans, STATUS.get(exit_code, "failed"), exit_code)
        if exit_code == EXIT_DONE:
            ran = [plan for plan in plans.values() if not plan.is_left_out]
            show.say(self.config, phase_curves.show_all(self.run_dir, ran))
        if self.config.format == Format.json:
            content = {"run_dir": str(self.run_dir), "exit_code": exit_code, "phases": self.ended}
            print(json.dumps(content, indent=1))

    def _write(self, plans: dict[str, Plan], status: str, exit_code: int | None = None) -> None:
        choices = [plan.chosen.choice for plan in plans.values() if plan.chosen]
        folders = _folders(plans)
        content = {
            "schema": 1,
            "run_id": self.run_dir.name,
            "overrides": list(self.request),
            "composition": composition(self.config),
            "composition_hash": composition_hash(self.config),
            "data": self.data,
            "phases": folders,
            # by the name of the phase of method=raft, `raft` if alone
            "chosen": {c.raft or "raft": c.record(folders) for c in choices if c.is_made},
            "status": status,
            "exit_code": exit_code,
        }
        json_files.write_json(self.run_dir / "record.json", sealed.seal(content))
