"""Phases: runs in order, the model of one feeding another, each in a directory of its own under one parent.

A pipeline that stopped goes on at the phase it stopped in: phases that are done are not run again. One that was changed keeps the phases
before the change (launch/pipelines/keeping.py). method=raft is a pipeline too.
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

from launch import record, show
from launch.check import NAME
from launch.chosen import with_choices
from launch.compose import compose, keys
from launch.errors import EXIT_DONE, EXIT_INTERRUPTED, HostError, UserError
from launch.execute import STATUS, check_host, execute, signals
from launch.files import rundir, sealed
from launch.files.check_files import check_files
from launch.files.paths import followed
from launch.machine import detect
from launch.pipelines import curves, cycles, keeping
from launch.plan import (
    Plan,
    composition,
    composition_hash,
    identity,
    identity_of,
    make_plan,
    outside,
    pipeline_json,
    prepare,
    shared_warnings,
)
from launch.rules.phases import check_phases
from launch.schema import Config, Data, Phase
from launch.schema.data import Curriculum
from launch.schema.enums import Find, Format, Init, Mode


def run(config: Config, overrides: list[str]) -> int:
    """Every phase of `config`, planned before the first one starts."""
    if config.runtime.name == "slurm":
        raise UserError("runtime=slurm with phases: a job is one run. Use: each phase as a run of its own, or runtime=local inside a job.")
    if config.find != Find.none:
        raise UserError(f"find={config.find.value} with phases: it searches for one run. Use: each phase as a run of its own.")
    host = detect.host(sys.executable)
    run_dir, resumed = rundir.choose(config)
    left = rundir.left(config, run_dir)
    composer = _Composer(overrides)
    plans = make_plans(config, overrides, host, run_dir, composer)
    changed = changed_phases(run_dir, plans) if resumed else []
    if changed and config.resume != "auto":
        remedy = "resume=auto begins another run and keeps the phases before the change; resume=never starts afresh."
        raise UserError(f"resume={config.resume}: phases changed since that run began: {'; '.join(changed)}. {remedy}")
    if changed:
        show.say(config, f"{run_dir} is left as it is, since phases changed since it began: {'; '.join(changed)}. This begins another.")
        run_dir, resumed = run_dir.parent / rundir.fresh_name(), False
        plans = make_plans(config, overrides, host, run_dir, composer)
    planned = functools.partial(make_plans, config, overrides, host, run_dir, composer)
    kept = keeping.find(config, run_dir.parent, plans, planned) if config.resume == "auto" and not resumed else None
    if kept:
        show.say(config, keeping.said(kept))
        plans = planned(kept=kept.folders) if kept.folders else plans
    name = run_dir.parent.name
    if config.mode == Mode.plan:
        to_run = [plan for name, plan in plans.items() if name not in outside(run_dir, plans) and not plan.is_left_out]
        silent = [dataclasses.replace(plan, warnings=[]) for plan in to_run]  # all of them are said once, at the end
        shown = pipeline_json(name, run_dir, plans)
        show.show(config, lambda: {**shown, "warnings": [*left, *shown["warnings"]]}, *silent)
        show.say_warnings(config, [*left, *shared_warnings(plans)])
        return EXIT_DONE
    found = {phase: _check_host(phase, plan, host) for phase, plan in plans.items() if not (plan.is_left_out or _is_done(plan.run_dir))}
    show.say_warnings(config, [*left, *shared_warnings(plans)])
    rundir.make(run_dir)
    with rundir.locked(run_dir), signals() as stopping:
        keeping.link(run_dir, plans)
        if resumed:
            show.say(config, f"Continues {run_dir}; resume=never starts afresh.")
        return _run_phases(config, overrides, run_dir, plans, host, found, stopping, planned)


def changed_phases(run_dir: Path, plans: dict[str, Plan]) -> list[str]:
    """What phases of `run_dir` that have begun were composed with, and are not now. The pipeline's own composition does not show it: conf/
    may have changed for the method of one phase."""
    then = (rundir.read_json(run_dir / "record.json") or {}).get("phases") or {}
    now = {name: plan.run_dir.name for name, plan in plans.items()}
    if not _folders(plans).items() <= then.items() <= now.items():  # cycles may be found to be left out after it was written
        return rundir.differences(then, now, "phases")
    found, kept = [], outside(run_dir, plans)
    for name, plan in plans.items():
        if why := keeping.lacks(plan.run_dir) if name in kept else rundir.untrusted(plan.run_dir):
            found.append(f"{name}: {why}")
        elif begun := rundir.read_json(plan.run_dir / "record.json"):
            found += rundir.differences(identity(begun["composition"]), identity_of(plan.config), name)
    return found


def _check_host(phase: str, plan: Plan, host: detect.Host) -> dict[str, Any] | None:
    """Of every phase that is to run, before the first one starts. Raises HostError."""
    try:
        return check_host(plan, host)
    except HostError as error:
        raise HostError(f"phase {phase}: {error}") from error


def make_plans(
    config: Config,
    overrides: list[str],
    host: detect.Host,
    run_dir: Path,
    composer: _Composer | None = None,
    kept: Mapping[str, Path] | None = None,
) -> dict[str, Plan]:
    """The plan of every phase by its name, in their order. `composer`: one that has composed them before, and reads conf/ no more.
    `kept`: phases of an earlier run, beside what `run_dir` has links for."""
    if NAME.applies(config):  # the other rules look at phases, each of which has a name of its own
        raise UserError(NAME.refusal(config))
    check_phases(config.phases)
    composer = composer or _Composer(overrides)
    given = config.phases or [Phase(name="")]

    def of_phase(phase: Phase) -> Config:
        with _named(phase):
            return _cycles_of(composer(phase) if config.phases else config)

    def expand(accuracies: Mapping[str, float]) -> list[Phase]:
        return cycles.expand(given, of_phase, accuracies)

    names = [phase.name for phase in expand({})]
    folders = {name: followed(run_dir / f"{number}_{name}") for number, name in enumerate(names, start=1)} | dict(kept or {})
    phases = expand(_accuracies(folders))
    return {phase.name: _plan(config, phase, composer, host, folders) for phase in phases}


def _accuracies(folders: Mapping[str, Path]) -> dict[str, float]:
    """Phase -> held-out accuracy, of the evaluations that are done."""
    results = {name: rundir.read_json(folder / "result.json") or {} for name, folder in folders.items() if _is_done(folder)}
    return {name: result["accuracy"] for name, result in results.items() if isinstance(result.get("accuracy"), float)}


def _is_done(folder: Path) -> bool:
    return (rundir.read_json(folder / "record.json") or {}).get("status") == "done"


class _Composer:
    """Compositions of phases: the experiment, the phase's overrides, then the command line's, which win. Cycles repeat theirs."""

    def __init__(self, overrides: list[str]) -> None:
        self.experiment = [o for o in overrides if o.startswith("experiment=")]
        self.others = [o for o in overrides if not o.startswith("experiment=")]
        self.given = keys(self.others)
        self.made: dict[tuple[str, ...], Config] = {}

    def __call__(self, phase: Phase) -> Config:
        """A composition of the phase's own. Raises UserError."""
        if isinstance(phase, cycles.CyclePhase):  # RAFT's method and arguments are its phases' already
            given = cycles.without_method(self.others)
            wanted = [*self.experiment, *phase.overrides, *given, *phase.groups]
        else:
            given = self.others
            wanted = [*self.experiment, *phase.overrides, *given]
        key = tuple(wanted)
        if key not in self.made:
            with _named(phase):
                self.made[key] = compose([*wanted, "phases=[]"], given=given)
                if self.made[key].runtime.name == "slurm":
                    raise UserError("runtime=slurm: a job is one run. Use: runtime=local inside a job.")
                if self.made[key].data.preview:
                    raise UserError("data.preview: a pipeline shows no rows. Use: the command of one phase, with data.preview.")
        return copy.deepcopy(self.made[key])


@contextlib.contextmanager
def _named(phase: Phase) -> Iterator[None]:
    """A message of UserError says which phase it is about."""
    try:
        yield
    except UserError as error:
        said = str(error)
        raise UserError(said if not phase.name or said.startswith("phase ") else f"phase {phase.name}: {said}") from error


def _cycles_of(config: Config) -> Config:
    """A composition that RAFT's phases can be made of: checked, smoke=true applied. Any other is looked at with its own phase."""
    return prepare(dataclasses.replace(config, effective_batch=None))[0] if config.method.kind == "cycles" else config


def _plan(config: Config, phase: Phase, composer: _Composer, host: detect.Host, folders: dict[str, Path]) -> Plan:
    with _named(phase):
        composed = composer(phase)
        composed.name = f"{folders[phase.name].parent.parent.name}-{phase.name}"
        source = str(folders[phase.model_from] / "model") if phase.model_from else composed.model.path
        if not config.smoke:
            composed.model.path = source
        if phase.data_from:
            composed.data = cycles.samples_of(folders[phase.data_from], composed)
        if phase.results_from:
            if composed.method.kind != "exporter":
                raise UserError(f"results_from with method={composed.method.name}: it writes no model card, and would ignore it.")
            composed.method.args["results_from"] = str(folders[phase.results_from])
        if isinstance(phase, cycles.CyclePhase):
            cycles.apply(composed, phase)
            if phase.pass_rates_from and composed.data.curriculum == Curriculum.adaptive:
                composed.data.pass_rates = str(folders[phase.pass_rates_from] / "result.json")
        of_part = cycles.of_part(phase.part, composer.given) if isinstance(phase, cycles.CyclePhase) else []
        prepared, warnings = prepare(composed, [*composer.given, *of_part])
        if isinstance(phase, cycles.CyclePhase) and phase.chosen and phase.part == "train":
            warnings = [*warnings, *phase.chosen.warnings()]
        prepared.model.path = source  # under smoke=true the model of an earlier phase is as small as this one's was just made
        prepared = with_choices(prepared, host, folders[phase.name])
        plan = make_plan(prepared, host, folders[phase.name], warnings)
        there = copy.deepcopy(prepared)  # but for what an earlier phase leaves
        if phase.model_from:
            there.model.path, there.model.init = None, Init.pretrained
        if phase.data_from:
            there.data = Data(kind="none")
        if isinstance(phase, cycles.CyclePhase) and phase.pass_rates_from:
            there.data.pass_rates = None
        if phase.results_from:
            del there.method.args["results_from"]
        check_files(there, all_lines=config.mode == Mode.run)
    return dataclasses.replace(plan, chosen=phase.chosen) if isinstance(phase, cycles.CyclePhase) else plan


def given_data(run_dir: Path, plans: list[Plan]) -> dict[str, Any]:
    """Data and adapters of all phases by content, but for what the phases themselves leave: a pipeline goes on with what it began with."""
    named = {path for plan in plans for path in [*record.data_paths(plan), *record.adapter_files(plan.config)]}
    own = {run_dir, *(plan.run_dir for plan in plans)}
    return record.contents(path for path in sorted(named) if own.isdisjoint(Path(path).parents))


def _run_phases(
    config: Config,
    overrides: list[str],
    run_dir: Path,
    plans: dict[str, Plan],
    host: detect.Host,
    found: dict[str, dict[str, Any] | None],
    stopping: list[int],
    again: Callable[[], dict[str, Plan]],
) -> int:
    """`found`: what check_host said of the image of each phase that is to run. `stopping`: signals that asked to stop, whenever they
    came. `again`: the plans once more, after an evaluation that may choose a cycle of RAFT."""
    kept: dict[str, Any] = {
        "schema": 1,
        "run_id": run_dir.name,
        "overrides": overrides,
        "composition": composition(config),
        "composition_hash": composition_hash(config),
        "data": given_data(run_dir, list(plans.values())),
    }

    def write(status: str, exit_code: int | None) -> None:
        of_now = {"phases": _folders(plans), "chosen": _chosen(plans)}
        rundir.write_json(run_dir / "record.json", sealed.seal({**kept, **of_now, "status": status, "exit_code": exit_code}))

    def fail(error: UserError | HostError) -> None:
        write("failed", error.exit_code)
        if config.format == Format.json:
            print(_end_json(run_dir, error.exit_code, ended))

    write("running", None)
    exit_code = EXIT_DONE
    ended: dict[str, Any] = {}
    for phase in plans:
        plan = plans[phase]
        if plan.is_left_out:
            continue
        if _is_done(plan.run_dir):
            ended[phase] = show.end_json(plan, EXIT_DONE)
            show.say(config, f"{plan.name}: done already")
            continue
        if stopping:
            exit_code = EXIT_INTERRUPTED
            show.say(config, f"{run_dir.parent.name}: interrupted before phase {phase}; the same command goes on there")
            break
        show.say(config, f"\nphase {plan.run_dir.name}: {plan.config.method.name} of {plan.config.model.path or plan.config.model.name}")
        try:
            exit_code = execute(plan, host, found[phase], overrides, parent=run_dir.name, stopping=stopping)
        except HostError as error:
            fail(error)
            raise HostError(f"phase {phase}: {error}") from error
        ended[phase] = show.end_json(plan, exit_code)
        show.say_end(config, plan, exit_code)
        if exit_code != EXIT_DONE:
            break
        if plan.chosen and plan.config.method.kind == "evaluator":
            try:
                plans = again()
            except (UserError, HostError) as error:  # for example a file of data that has gone since
                fail(error)
                raise
            write("running", None)
    write(STATUS.get(exit_code, "failed"), exit_code)
    if exit_code == EXIT_DONE:
        curves.show_end(config, run_dir, [plan for phase, plan in plans.items() if phase in _folders(plans)])
    if config.format == Format.json:
        print(_end_json(run_dir, exit_code, ended))
    return exit_code


def _folders(plans: dict[str, Plan]) -> dict[str, str]:
    """Phase -> its directory, of those that are run."""
    return {name: plan.run_dir.name for name, plan in plans.items() if not plan.is_left_out}


def _chosen(plans: dict[str, Plan]) -> dict[str, Any]:
    """Phase of method=raft (`raft` where it is the whole run) -> the choice of its cycle, where it is made."""
    choices = {plan.chosen.choice.raft: plan.chosen.choice for plan in plans.values() if plan.chosen and plan.chosen.choice.is_made}
    return {raft or "raft": choice.record(_folders(plans)) for raft, choice in choices.items()}


def _end_json(run_dir: Path, exit_code: int, ended: dict[str, Any]) -> str:
    return json.dumps({"run_dir": str(run_dir), "exit_code": exit_code, "phases": ended}, indent=1)
