"""Run a sweep (-m): a grid of the lists on the command line, or a search by Optuna (sweep=NAME).

Each trial is a `python launch/run.py` process with exclusive GPUs. The same command resumes a
stopped sweep without running finished trials again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from launch.config import hydra_options
from launch.config.compose import compose
from launch.config.identity import NOT_IDENTITY, composition, identity
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_USER, UserError, near
from launch.core.json_files import plain
from launch.execution.execute import signals
from launch.machine import detect
from launch.machine.detect import Host
from launch.plan import rundir
from launch.rules.values import check_value
from launch.schema import Config
from launch.schema.checked import Range
from launch.schema.enums import Mode
from launch.study import pipeline, sweep_plan, sweep_report
from launch.study import space as sweep_space
from launch.study.optuna_study import Grid, Search, Source
from launch.study.trial_loop import Loop
from launch.study.trials import Trial

# These keys and sweep.* apply to the complete sweep.
SWEEP_KEYS = ("mode", "format", "find", "resume", "data.preview")
SEARCH_TRIALS = 5  # suggestions checked before a search starts; one of them has to be valid


@dataclass(frozen=True)
class Command:
    """A parsed command: the overrides that all trials share, and each grid trial's overrides."""

    config: Config
    folder: Path
    shared: list[str]
    grid: list[list[str]]

    @property
    def is_search(self) -> bool:
        return self.config.sweep.name != "none"

    def source(self) -> Source:
        """Return the source of trials. A search continues from the trials in sweep.json."""
        if not self.is_search:
            return Grid(self.grid)
        content = json_files.read_json(self.folder / "sweep.json") or {}
        return Search(self.config.sweep, self.config.seed, content.get("trials", ()))

    def next_trials(self, limit: int | None = None) -> Iterator[Trial]:
        """Yield the next trials: of a grid at most `limit`, of a search at most SEARCH_TRIALS."""
        trials = iter(self.source().next, None)
        return islice(trials, SEARCH_TRIALS if self.is_search else limit)


def is_requested(arguments: list[str]) -> bool:
    return any(argument in ("-m", "--multirun") for argument in arguments)


def reject_sweep_keys(config: Config, request: Request) -> None:
    """Raise UserError if a single run sets keys that only a sweep reads."""
    sweep_overrides = [o for o in request if _key(o).startswith("sweep.")]
    if config.sweep.name != "none":
        sweep_overrides.append(f"sweep={config.sweep.name}")
    if sweep_overrides:
        raise UserError(
            f"{sweep_overrides[0]}: takes no effect on a single run. "
            "Use `python launch/run.py -m ...` for a sweep, or remove it."
        )


def run(arguments: list[str]) -> int:
    """Run or plan a sweep; return 0, the first other exit code of a trial, or 75 if interrupted."""
    request = Request(a for a in arguments if a not in ("-m", "--multirun"))
    request.print_warnings()
    command = parse_command(request)
    config, host = command.config, detect.host(sys.executable)
    if config.mode == Mode.plan:
        return _plan(command, host, request)
    sweep_plan.plan_trials(
        command.next_trials(), command.shared, host, plan_all=False, check_hosts=True
    )
    rundir.make(command.folder)
    with rundir.locked(command.folder):
        source = command.source()
        loop = Loop(config, command.folder, command.shared, source, host)
        with signals() as stopping:
            exit_code = loop.run(stopping)
    sweep_report.show_end(config, loop.content(), exit_code)
    return exit_code


def parse_command(request: Request) -> Command:
    """Parse and check the command of a sweep. Raises UserError."""
    fixed, grid = sweep_space.split(request)
    hydra_options.reject_hydra_keys(Request([*fixed, *grid[0]]))
    for override in grid[0]:
        if (key := _key(override)) in SWEEP_KEYS or key.startswith("sweep."):
            raise UserError(f"{override}, ...: a sweep has a single {key}. Use one value.")
    _check_names(fixed, grid)
    config = _compose_first(fixed, grid)
    sweep, name, inputs = config.sweep, config.name, list[Any]()
    typed = [o for o in fixed if _key(o).partition(".")[0] not in ("mode", "format", "sweep")]
    _check(config, typed, grid[0])
    if sweep.name == "none":
        identifying = sorted(o for o in typed if o.partition("=")[0] not in NOT_IDENTITY)
        name, inputs = name or "grid", [str(Path.cwd()), identifying, grid]
    else:
        # Other fixed values make another search.
        config = compose([*sweep.overrides, *fixed])
        goal = [sweep.metric, sweep.direction.value, plain(sweep.space)]
        name, inputs = config.name or sweep.name, [identity(composition(config)), *goal]
        typed = [*sweep.overrides, *typed]
    # The same sweep uses the same directory, unless resume=never.
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]
    fresh = f"-{rundir.fresh_name()}" if config.resume == "never" else ""
    folder = Path(config.run_root) / "sweeps" / f"{name}-{digest}{fresh}"
    return Command(config, folder, typed, grid)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _check_names(fixed: list[str], grid: list[list[str]]) -> None:
    """Raise UserError for an unknown parameter of sweep.space.

    Hydra's error would be about its value.
    """
    overrides = [o for o in fixed if _key(o).startswith("sweep.space.")]
    if not overrides:
        return
    space = _compose_first([o for o in fixed if o not in overrides], grid).sweep.space
    for override in overrides:
        if (name := _key(override).split(".")[2]) not in space:
            raise UserError(
                f"{override}: sweep.space has no {name!r}.{near(name, space)} "
                f"To add one: '+sweep.space={{{name}: {{key: seed, values: [0, 1]}}}}'."
            )


def _compose_first(shared: list[str], grid: list[list[str]]) -> Config:
    """Return the first valid composition of a trial.

    Raises the first trial's UserError if all trials are invalid.
    """
    errors = []
    for varied in grid:
        try:
            return compose([*shared, *varied])
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _check(config: Config, typed: list[str], varied: list[str]) -> None:
    """Raise UserError for settings of a single run or inconsistent settings of a sweep.

    `typed` are the overrides that all trials share, `varied` the first grid trial's.
    """
    sweep, is_search = config.sweep, config.sweep.name != "none"
    resume = {f"resume={config.resume}": config.resume not in ("auto", "never")}
    pipeline.reject_single_run_keys(config, "-m starts several. Remove it.", **resume)
    check_value("sweep.parallel", sweep.parallel, Range(minimum=1))
    check_value("sweep.num_trials", sweep.num_trials, Range(minimum=1))
    goal = sweep_report.goal_of(sweep.metric)
    by_key = {_key(override): override for override in typed}
    fixed = [n for n, parameter in sweep.space.items() if parameter.key in by_key]
    if goal is not None and goal != sweep.direction:
        raise UserError(
            f"sweep.direction={sweep.direction.value} with sweep.metric={sweep.metric} selects the "
            f"worst trial. Use sweep.direction={goal.value}."
        )
    if sweep.space and not is_search:
        raise UserError(
            "sweep.space takes no effect on a grid. "
            "For a search, add sweep.name=<name> sweep.metric=<metric>."
        )
    if is_search and varied:
        raise UserError(
            f"{varied[0]}, ...: sweep={sweep.name} is a search and not a grid. Remove one of them."
        )
    if is_search and fixed:
        override = by_key[sweep.space[fixed[0]].key]
        raise UserError(
            f"{override}: sweep={sweep.name} varies this key. "
            f"To fix it, add '~sweep.space.{fixed[0]}'."
        )
    if is_search:
        sweep_space.check(sweep)


def _plan(command: Command, host: Host, request: Request) -> int:
    """Show the plan. Return 2 if a trial of a grid is rejected, else 0."""
    config = command.config
    planned = sweep_plan.plan_trials(
        command.next_trials(sweep_plan.CHECKED),
        command.shared,
        host,
        plan_all=not command.is_search,
    )
    source = command.source()
    trials = [*source.trials, *(source.waiting if isinstance(source, Grid) else [])]
    content = sweep_report.sweep_json(
        command.folder, config.sweep, command.shared, trials, source.total
    )
    if planned is None:
        sweep_report.show_end(config, content, EXIT_DONE)
        return EXIT_DONE
    for number, reason in planned.rejected.items():
        print(f"[{number}] {reason}", file=sys.stderr)
    sweep_plan.show(request, config, content, planned, host)
    return EXIT_USER if planned.rejected and not command.is_search else EXIT_DONE
