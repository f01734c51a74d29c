"""One command: compose, check, plan, execute, record.

python launch/run.py hardware=mi350x method=grpo model=qwen3_4b mode=plan
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import pipeline, preview, show, sweep
from launch.chosen import with_choices
from launch.command_line import given, help, hydra_options
from launch.command_line.stream import run_program
from launch.compose import compose, keys
from launch.errors import EXIT_DONE, EXIT_HOST, EXIT_INTERRUPTED, HostError, UserError
from launch.execute import check_host, execute
from launch.files import rundir
from launch.files.check_files import check_files
from launch.machine import detect
from launch.plan import Plan, as_json, has_phases, make_plan, prepare
from launch.planner import fit
from launch.planner.choose import choose
from launch.planner.faster import faster
from launch.runtimes import slurm
from launch.schema.enums import Find, Mode, Preflight


def run(overrides: list[str]) -> int:
    """One composition from its overrides to its exit code."""
    config = compose(overrides)
    hydra_options.refuse(overrides)
    sweep.refuse(config, overrides)
    repeated, named = given.repeated(overrides), keys(overrides)
    if has_phases(config):
        given.say(repeated)
        return pipeline.run(config, overrides)
    host, found = detect.host(sys.executable), None
    if config.find != Find.none:
        overrides, found = fit.search(config, overrides, host)
        config = compose(overrides)
    config, warnings = prepare(config, named)
    warnings = [*repeated, *warnings]
    check_files(config, all_lines=config.mode == Mode.run)
    if config.data.preview and config.mode == Mode.run:
        return preview.run(choose(config, host), host, warnings, overrides)
    run_dir, resumed = rundir.choose(config)
    warnings = [*warnings, *rundir.left(config, run_dir), *rundir.moved(config, run_dir)]
    config = with_choices(config, host, run_dir)
    plan = make_plan(config, host, run_dir, warnings)
    forced = config.mode == Mode.run and config.preflight == Preflight.warn  # check_plan then says what is lacking
    advice = None if forced else fit.advice(plan, overrides, host)
    on_slurm = config.runtime.name == "slurm"
    if config.mode == Mode.plan:
        return show_plan(plan, host, found, advice)
    if advice:
        raise HostError(f"{advice}\npreflight=warn starts it all the same.")
    if on_slurm:
        show.show_start(config, plan, None, resumed)
        return slurm.submit(plan, host, overrides, config)
    image = check_host(plan, host)
    show.show_start(config, plan, image, resumed)
    exit_code = execute(plan, host, image, overrides)
    show.show_end(config, plan, exit_code)
    return exit_code


def show_plan(plan: Plan, host: detect.Host, found: dict[str, Any] | None, advice: str | None) -> int:
    """What would run, with what find= has found and, where it does not fit, what would."""
    config, on_slurm = plan.config, plan.config.runtime.name == "slurm"
    plan = dataclasses.replace(plan, warnings=[*plan.warnings, *([advice] if advice else [])], faster=faster(config, host))
    whole = {"found": found} if found else {}
    show.show(config, lambda: {**(slurm.plan_json(plan, host) if on_slurm else as_json(plan)), **whole}, plan)
    if found:
        show.say(config, "\n".join(found["said"]))
    if on_slurm:
        show.say(config, f"\n{slurm.SCRIPT}:\n{slurm.script(plan, host)}")
    return EXIT_DONE


def main(arguments: list[str]) -> int:
    if help.wanted(arguments):
        print(help.text())
        return EXIT_DONE
    try:
        if sweep.wanted(arguments):
            given.say(given.repeated([a for a in arguments if not a.startswith("-")]))
            return sweep.run(arguments)
        return hydra_options.run(arguments, run) if hydra_options.wanted(arguments) else run(arguments)
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before anything runs; a run that is under way saves first
        print("interrupted: nothing was started", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:  # a disk that is full, a run directory that went away
        print(f"{error.filename or 'this machine'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_HOST


if __name__ == "__main__":
    run_program(main)
