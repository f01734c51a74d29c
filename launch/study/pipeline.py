"""Run phases in order, each in its own directory under one parent; models feed later phases.

A pipeline that stopped resumes at the phase in which it stopped. One that was changed keeps the
phases before the change (launch/study/keeping.py). method=raft is a pipeline too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.config.compose import compose
from launch.config.identity import composition, composition_hash, identity, identity_of
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, HostError, UserError
from launch.execution import record
from launch.execution.execute import STATUS, check_host, execute, signals
from launch.inputs.paths import followed
from launch.machine import detect
from launch.plan import rundir, sealed, show
from launch.plan.check_files import check_files
from launch.plan.chosen import with_choices
from launch.plan.planning import make_plan, prepare
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
    host = detect.host(sys.executable)
    run_dir, resumed = rundir.choose(config)
    left = rundir.left(config, run_dir)
    composer = _Composer(request)

    def planned(kept: Mapping[str, Path] | None = None) -> dict[str, Plan]:
        return make_plans(config, request, host, run_dir, composer, kept)

    plans = planned()
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
        plans = planned()
    if config.resume == "auto" and not resumed:
        kept = keeping.find(config, run_dir.parent, plans, planned)
        if kept:
            show.say(config, keeping.said(kept))
            plans = planned(kept.folders) if kept.folders else plans
    warnings = [*left, *shared_warnings(plans)]
    if config.mode == Mode.plan:
        here = plans.keys() - outside(run_dir, plans).keys()
        to_run = [plan for name, plan in plans.items() if name in here and not plan.is_left_out]
        silent = [
            dataclasses.replace(plan, warnings=[]) for plan in to_run
        ]  # these are shown once, at the end
        shown = pipeline_json(run_dir.parent.name, run_dir, plans)
        show.show(config, lambda: {**shown, "warnings": [*left, *shown["warnings"]]}, *silent)
        show.say_warnings(config, warnings)
        return EXIT_DONE
    images = {}
    for name, plan in plans.items():  # check all before the first phase starts
        if not plan.is_left_out and not _is_done(plan.run_dir):
            with _named(name):
                images[name] = check_host(plan, host)
    show.say_warnings(config, warnings)
    rundir.make(run_dir)
    with rundir.locked(run_dir), signals() as stopping:
        keeping.link(run_dir, plans)
        if resumed:
            show.say(config, f"Resuming {run_dir}; resume=never starts afresh.")
        return _run_phases(config, request, run_dir, plans, host, images, stopping, planned)


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
    changes, kept = [], outside(run_dir, plans)
    for name, plan in plans.items():
        if why := keeping.lacks(plan.run_dir) if name in kept else rundir.untrusted(plan.run_dir):
            changes.append(f"{name}: {why}")
        elif begun := json_files.read_json(plan.run_dir / "record.json"):
            old, new = identity(begun["composition"]), identity_of(plan.config)
            changes += rundir.differences(old, new, name)
    return changes


def make_plans(
    config: Config,
    request: Request,
    host: detect.Host,
    run_dir: Path,
    composer: _Composer | None = None,
    kept: Mapping[str, Path] | None = None,
) -> dict[str, Plan]:
    """Return the plan of every phase by name, in order. Raises UserError, HostError.

    `composer` holds compositions made before. `kept` maps phases to their directories in an earlier
    run, in addition to those that `run_dir` links to.
    """
    check_value("name", config.name, NAME)  # each phase, which is checked later, has its own
    check_phases(config.phases)
    composer = composer or _Composer(request)

    def of_phase(phase: Phase) -> Config:
        """Return a phase's composition; if it stands for a RAFT's phases, check and scale it."""
        with _named(phase.name):
            composed = composer(phase) if config.phases else config
            if not composed.method.has_cycles:
                return composed
            return prepare(dataclasses.replace(composed, effective_batch=None))[0]

    def expand(accuracies: Mapping[str, float]) -> list[Phase]:
        return cycles.expand(config.phases or [Phase(name="")], of_phase, accuracies)

    folders = {
        phase.name: followed(run_dir / f"{number}_{phase.name}")
        for number, phase in enumerate(expand({}), start=1)
    } | dict(kept or {})
    accuracies: dict[str, float] = {}
    for name, folder in folders.items():
        result = json_files.read_json(folder / "result.json") if _is_done(folder) else None
        if isinstance(accuracy := (result or {}).get("accuracy"), float):
            accuracies[name] = accuracy
    plans = {}
    for phase in expand(accuracies):
        with _named(phase.name):
            plans[phase.name] = _plan(config, phase, composer, host, folders)
    return plans


def _is_done(folder: Path) -> bool:
    return (json_files.read_json(folder / "record.json") or {}).get("status") == "done"


class _Composer:
    """Compose phases: the experiment, the phase's overrides, then the command line's, which win.

    Compositions are kept, because cycles repeat them.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.others = request.without("experiment")
        self.experiment = [o for o in request if o not in self.others]
        self.made: dict[tuple[str, ...], Config] = {}

    def __call__(self, phase: Phase) -> Config:
        """Return a composition that the caller may change. Raises UserError."""
        given, groups = self.others, []
        if isinstance(phase, CyclePhase):  # it already has RAFT's method and arguments
            given, groups = Request(cycles.without_method(self.others)), phase.groups
        overrides = (*self.experiment, *phase.overrides, *given, *groups)
        if overrides not in self.made:
            config = compose([*overrides, "phases=[]"], typed=given)
            for override, is_of_one_run in {
                "runtime=slurm": config.runtime.name == "slurm",
                "data.preview": bool(config.data.preview),
                f"find={config.find.value}": config.find != Find.none,
            }.items():
                if is_of_one_run:
                    raise UserError(
                        f"{override}: is for one run, and a pipeline has several. Leave it out, "
                        "or start each phase by itself. In a Slurm job, use runtime=local."
                    )
            self.made[overrides] = config
        return copy.deepcopy(self.made[overrides])


@contextlib.contextmanager
def _named(phase: str) -> Iterator[None]:
    """Prefix errors with the name of the phase that they are about."""
    try:
        yield
    except (UserError, HostError) as error:
        if not phase or str(error).startswith("phase "):
            raise
        raise type(error)(f"phase {phase}: {error}") from error


def _plan(
    config: Config, phase: Phase, composer: _Composer, host: detect.Host, folders: dict[str, Path]
) -> Plan:
    cycle = phase if isinstance(phase, CyclePhase) else None
    folder, composed, given = folders[phase.name], composer(phase), composer.others.keys
    composed.name = f"{folder.parent.parent.name}-{phase.name}"
    source = str(folders[phase.model_from] / "model") if phase.model_from else composed.model.path
    if not config.smoke:
        composed.model.path = source
    if phase.data_from:
        composed.data = cycles.samples_of(folders[phase.data_from], composed)
    if phase.results_from:
        composed.method.args["results_from"] = str(folders[phase.results_from])
    if cycle:
        cycles.apply(composed, cycle)
        if cycle.pass_rates_from and composed.data.curriculum == Curriculum.adaptive:
            composed.data.pass_rates = str(folders[cycle.pass_rates_from] / "result.json")
        given = [*given, *cycles.of_part(cycle.part, given)]
    prepared, warnings = prepare(composed, given)
    if cycle and cycle.chosen and cycle.part == "train":
        warnings = [*warnings, *cycle.chosen.warnings()]
    # smoke=true has just scaled this phase's model; the earlier phase's is as small.
    prepared.model.path = source
    prepared = with_choices(prepared, host, folder)
    plan = make_plan(prepared, host, folder, warnings, composer.request)
    there = copy.deepcopy(prepared)  # without what earlier phases will leave
    if phase.model_from:
        there.model.path, there.model.init = None, Init.pretrained
    if phase.data_from:
        there.data = Data(kind="none")
    if cycle and cycle.pass_rates_from:
        there.data.pass_rates = None
    if phase.results_from:
        del there.method.args["results_from"]
    check_files(there, all_lines=config.mode == Mode.run)
    return dataclasses.replace(plan, chosen=cycle.chosen) if cycle else plan


def given_data(run_dir: Path, plans: list[Plan]) -> dict[str, Any]:
    """Return the content of all phases' data and adapters, except the outputs of other phases.

    A pipeline resumes only with the data with which it began.
    """
    paths = {p for plan in plans for p in record.data_paths(plan)}
    paths |= {p for plan in plans for p in record.adapter_files(plan.config)}
    own = {run_dir, *(plan.run_dir for plan in plans)}
    return record.contents(path for path in sorted(paths) if own.isdisjoint(Path(path).parents))


def _run_phases(
    config: Config,
    request: Request,
    run_dir: Path,
    plans: dict[str, Plan],
    host: detect.Host,
    images: dict[str, dict[str, Any] | None],
    stopping: list[int],
    planned: Callable[[], dict[str, Plan]],
) -> int:
    """Run the phases that are not done, and return the exit code.

    `images` is what check_host returned for each phase. `planned` plans again after an evaluation.
    """
    ended: dict[str, Any] = {}
    data = given_data(run_dir, list(plans.values()))
    write = functools.partial(_write_record, config, request, run_dir, data)
    write(plans, "running", None)
    exit_code = EXIT_DONE
    for phase in plans:  # choosing a cycle replaces the plans, but not their names
        plan = plans[phase]
        if plan.is_left_out:
            continue
        if _is_done(plan.run_dir):
            ended[phase] = show.end_json(plan, EXIT_DONE)
            show.say(config, f"{plan.name}: done already")
            continue
        if stopping:
            exit_code, name = EXIT_INTERRUPTED, run_dir.parent.name
            show.say(config, f"{name}: interrupted before phase {phase}; the same command resumes")
            break
        model = plan.config.model.path or plan.config.model.name
        show.say(config, f"\nphase {plan.run_dir.name}: {plan.config.method.name} of {model}")
        try:
            with _named(phase):
                exit_code = execute(plan, host, images[phase], run_dir.name, stopping)
            ended[phase] = show.end_json(plan, exit_code)
            show.say_end(config, plan, exit_code)
            if exit_code != EXIT_DONE:
                break
            if plan.chosen and plan.config.method.measures_model:
                plans = planned()
                write(plans, "running", None)
        except (UserError, HostError) as error:  # planning again may find that a data file is gone
            write(plans, "failed", error.exit_code)
            _print_end(config, run_dir, error.exit_code, ended)
            raise
    write(plans, STATUS.get(exit_code, "failed"), exit_code)
    if exit_code == EXIT_DONE:
        ran = [plan for plan in plans.values() if not plan.is_left_out]
        show.say(config, phase_curves.show_all(run_dir, ran))
    _print_end(config, run_dir, exit_code, ended)
    return exit_code


def _print_end(config: Config, run_dir: Path, exit_code: int, ended: dict[str, Any]) -> None:
    if config.format == Format.json:
        content = {"run_dir": str(run_dir), "exit_code": exit_code, "phases": ended}
        print(json.dumps(content, indent=1))


def _write_record(
    config: Config,
    request: Request,
    run_dir: Path,
    data: dict[str, Any],
    plans: dict[str, Plan],
    status: str,
    exit_code: int | None,
) -> None:
    choices = [plan.chosen.choice for plan in plans.values() if plan.chosen]
    # by the name of the phase of method=raft, `raft` if alone
    chosen = {c.raft or "raft": c.record(_folders(plans)) for c in choices if c.is_made}
    content = {
        "schema": 1,
        "run_id": run_dir.name,
        "overrides": list(request),
        "composition": composition(config),
        "composition_hash": composition_hash(config),
        "data": data,
        "phases": _folders(plans),
        "chosen": chosen,
        "status": status,
        "exit_code": exit_code,
    }
    json_files.write_json(run_dir / "record.json", sealed.seal(content))


def _folders(plans: dict[str, Plan]) -> dict[str, str]:
    """Return the directory names of the phases that run."""
    return {name: plan.run_dir.name for name, plan in plans.items() if not plan.is_left_out}
