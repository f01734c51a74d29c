"""Phases: runs in order, the model of one feeding another, each in a directory of its own under one parent.

A pipeline that stopped goes on at the phase it stopped in: phases that are done are not run again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from launch import curves, detect, record, rundir, show
from launch.check_files import check_files
from launch.compose import compose
from launch.errors import EXIT_DONE, UserError
from launch.execute import STATUS, check_host, execute
from launch.plan import Plan, composition, composition_hash, make_plan, pipeline_json, prepare
from launch.schema import Config, Phase
from launch.schema_enums import Find, Mode


def run(config: Config, overrides: list[str]) -> int:
    """Every phase of `config`, planned before the first one starts."""
    if config.runtime.name == "slurm":
        raise UserError("runtime=slurm with phases: a job is one run. Use: each phase as a run of its own, or runtime=local inside a job.")
    if config.find != Find.none:
        raise UserError(f"find={config.find.value} with phases: it searches for one run. Use: each phase as a run of its own.")
    host = detect.host(sys.executable)
    run_dir, resumed = rundir.choose(config)
    plans = {phase.name: plan_phase(config, phase, overrides, host, run_dir) for phase in config.phases}
    name = run_dir.parent.name
    if config.mode == Mode.plan:
        show.show(config, lambda: pipeline_json(name, run_dir, plans), *plans.values())
        return EXIT_DONE
    found = {name: check_host(plan, host) for name, plan in plans.items()}
    rundir.make(run_dir)
    with rundir.locked(run_dir):
        if resumed:
            show.say(config, f"Continues {run_dir}; resume=never starts afresh.")
        exit_code = _run_phases(config, overrides, run_dir, plans, host, found)
    return exit_code


def phase_dir(config: Config, name: str, run_dir: Path) -> Path:
    names = [phase.name for phase in config.phases]
    if name not in names:
        raise UserError(f"phases: model_from={name} names no phase. Phases: {', '.join(names)}.")
    return run_dir / f"{names.index(name) + 1}_{name}"


def plan_phase(config: Config, phase: Phase, overrides: list[str], host: detect.Host, run_dir: Path) -> Plan:
    """The plan of one phase: the experiment, the phase's overrides, then the command line's, which win."""
    mine = [*(o for o in overrides if o.startswith("experiment=")), *phase.overrides]
    theirs = [o for o in overrides if not o.startswith("experiment=")]
    source = [f"model.path={phase_dir(config, phase.model_from, run_dir) / 'model'}"] if phase.model_from else []
    try:
        composed = compose([*mine, *theirs, *source, "phases=[]", f"name={run_dir.parent.name}-{phase.name}"])
        prepared, warnings = prepare(composed)
        plan = make_plan(prepared, host, phase_dir(config, phase.name, run_dir), warnings)
        if not phase.model_from:  # the model of an earlier phase is not there yet
            check_files(prepared, all_lines=config.mode == Mode.run)
    except UserError as error:
        raise UserError(f"phase {phase.name}: {error}") from error
    return plan


def _run_phases(
    config: Config,
    overrides: list[str],
    run_dir: Path,
    plans: dict[str, Plan],
    host: detect.Host,
    found: dict[str, dict[str, Any] | None],
) -> int:
    """`found`: what check_host said of each phase's image."""
    kept: dict[str, Any] = {
        "schema": 1,
        "run_id": run_dir.name,
        "status": "running",
        "exit_code": None,
        "overrides": overrides,
        "composition": composition(config),
        "composition_hash": composition_hash(config),
        "phases": {name: plan.run_dir.name for name, plan in plans.items()},
    }
    rundir.write_json(run_dir / "record.json", record.seal(kept))
    exit_code = EXIT_DONE
    for phase, plan in plans.items():
        if (rundir.read_json(plan.run_dir / "record.json") or {}).get("status") == "done":
            show.say(config, f"{plan.name}: done already")
            continue
        show.say(config, f"\nphase {plan.run_dir.name}: {plan.config.method.name} of {plan.config.model.path or plan.config.model.name}")
        exit_code = execute(plan, host, found[phase], overrides, parent=run_dir.name)
        show.show_end(config, plan, exit_code)
        if exit_code != EXIT_DONE:
            break
    status = STATUS.get(exit_code, "failed")
    rundir.write_json(run_dir / "record.json", record.seal({**kept, "status": status, "exit_code": exit_code}))
    if exit_code == EXIT_DONE:
        curves.show_end(config, run_dir, list(plans.values()))
    return exit_code
