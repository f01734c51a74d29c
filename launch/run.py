"""Compose, check, plan, execute and record one run.

python launch/run.py hardware=mi350x method=grpo model=qwen3_4b mode=plan
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))

from launch.core import stop_signals

if __name__ == "__main__":
    stop_signals.install()

import launch.core.installed  # noqa: F401

# isort: split
import dataclasses
from typing import Any

from launch.config import help, hydra_options, user_secrets
from launch.config.choose import choose
from launch.config.compose import compose
from launch.config.identity import has_phases
from launch.config.request import Request
from launch.core.console import run_program
from launch.core.errors import (
    EXIT_DONE,
    EXIT_HOST,
    HostError,
    UserError,
    os_error_text,
)
from launch.execution import kubernetes, row_preview, slurm, terminal
from launch.execution.execute import check_host, execute
from launch.machine import detect
from launch.plan import plan_page, resuming, rundir, show
from launch.plan.check_files import check_files
from launch.plan.planning import make_plan, prepare, with_choices
from launch.plan.views import as_json
from launch.schema import Config
from launch.schema.enums import Find, Mode
from launch.schema.plan import Plan
from launch.search import fit
from launch.search.faster import cheaper, faster
from launch.study import pipeline, sweep

MAX_SAID = 8  # lines of a search's result without verbose=true


def run(overrides: list[str]) -> int:
    """Run one command and return its exit code. Raises UserError and HostError."""
    request, search_result = Request(overrides), None
    config = compose(request)
    hydra_options.reject_hydra_keys(request)
    sweep.reject_sweep_keys(config, request)
    if has_phases(config):
        request.print_warnings()
        return run_pipeline(config, request)
    host = detect.host(sys.executable)
    if config.find != Find.none:
        request, search_result = fit.search(config, request, host)
        config = compose(request)
    config, warnings = prepare(config, request.keys)
    is_plan = config.mode == Mode.plan
    warnings += check_files(config, not is_plan, host if is_plan else None)
    warnings = [*request.warnings, *warnings]
    kubernetes.check(config, host, request)
    if config.data.preview and config.mode == Mode.run:
        return row_preview.run(choose(config, host), host, warnings, request)
    if config.method.kind == "chat" and config.mode == Mode.run:
        return terminal.run(choose(config, host), host, warnings, request)
    run_dir, resumed = rundir.choose(config, starts=config.mode == Mode.run)
    warnings += rundir.skipped_run_notes(config, run_dir)
    warnings += resuming.notes(config, run_dir)
    plan = make_plan(with_choices(config, host, run_dir), host, run_dir, warnings, request)
    if config.mode == Mode.plan:
        return show_plan(plan, host, search_result)
    fit.admit(plan, host)
    if config.runtime.name == "slurm":
        show.show_start(plan.config, plan, None, resumed)
        return slurm.submit(plan, host)
    image = check_host(plan, host)
    show.show_start(plan.config, plan, image, resumed)
    exit_code = execute(plan, host, image)
    show.show_end(plan.config, plan, exit_code)
    return exit_code


def run_pipeline(config: Config, request: Request) -> int:
    """Run a pipeline, with its hardware report if requested, and return its exit code."""
    if config.hardware_report:
        # Other commands do not need the reports.
        from launch.reports import hardware_report

        return hardware_report.run(config, request)
    return pipeline.run(config, request)


def show_plan(plan: Plan, host: detect.Host, search_result: dict[str, Any] | None) -> int:
    """Show the plan, the result of find=, changes if the run does not fit, and the next command."""
    config, runtime = plan.config, plan.config.runtime.name
    advice, change = fit.advice(plan, host)
    warnings = [*plan.warnings, *([advice] if advice else [])]
    command = Request(plan.overrides)
    plan = dataclasses.replace(
        plan,
        warnings=warnings,
        faster=[
            offer for offer in faster(config, host, plan.balance) if fit.composes(command, offer)
        ],
        cheaper=cheaper(config, command, host),
    )

    def content() -> dict[str, Any]:
        planned = as_json(plan)
        if runtime == "slurm":
            planned["script"] = slurm.script(plan, host)
        if runtime == "kubernetes":
            planned["manifest"] = kubernetes.manifest(plan, host)
        return {**planned, **({"found": search_result} if search_result else {})}

    show.show(config, content, lambda: plan_page.page(plan, host, config.verbose))
    if runtime == "slurm" and config.verbose:
        show.say(config, f"\n{slurm.SCRIPT}:\n{slurm.script(plan, host)}")
    if runtime == "kubernetes":
        show.say(config, f"manifest:\n{kubernetes.as_yaml(plan, host)}")
    show.print_warnings(config, warnings)
    if search_result:
        show.say_lines(config, search_result["said"][: None if config.verbose else MAX_SAID])
    if advice and not change:  # the same command would be refused
        show.say(config, plan_page.search_command(command))
        return EXIT_DONE
    for override in change:  # replace a value, because two values of a key cause a warning
        command = command.without(override.partition("=")[0])
    show.say_next_run(config, host, command.plus(*change), plan=plan)
    return EXIT_DONE


def main(arguments: list[str]) -> int:
    """Run a command line and return the exit code. Print each error as one message."""
    if help.is_requested(arguments):
        print(help.text())
        return EXIT_DONE
    try:
        arguments = user_secrets.to_environment(arguments)
        if sweep.is_requested(arguments):
            return sweep.run(arguments)
        if hydra_options.is_requested(arguments):
            return hydra_options.run(arguments, run)
        return run(arguments)
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:  # such as a full disk or a deleted run directory
        print(os_error_text(error), file=sys.stderr)
        return EXIT_HOST


if __name__ == "__main__":
    run_program(main)
