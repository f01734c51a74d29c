"""Run -m: a grid over the command line's lists of values, or a search by Optuna (sweep=NAME).

Every trial is a `python launch/run.py` process on its own GPUs. The same command resumes a stopped
sweep; finished trials do not run again.
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

OF_THE_SWEEP = ("mode", "format", "find", "resume", "data.preview")  # and sweep.*
TRIED = 5  # a search is rejected if its first suggestions, this many, are all rejected


@dataclass(frozen=True)
class Command:
    """A sweep's command line.

    `shared` holds the overrides of every trial, `grid` those of each trial of a grid.
    """

    config: Config
    folder: Path
    shared: list[str]
    grid: list[list[str]]

    @property
    def is_search(self) -> bool:
        return self.config.sweep.name != "none"

    def source(self) -> Source:
        """Return the source of trials; a search continues from those in sweep.json."""
        if not self.is_search:
            return Grid(self.grid)
        content = json_files.read_json(self.folder / "sweep.json") or {}
        return Search(self.config.sweep, self.config.seed, content.get("trials", ()))

    def to_run(self, most: int | None = None) -> Iterator[Trial]:
        """Yield the trials to run next: at most `most` of a grid, TRIED of a search."""
        trials = iter(self.source().next, None)
        return islice(trials, TRIED if self.is_search else most)


def is_requested(arguments: list[str]) -> bool:
    return any(argument in ("-m", "--multirun") for argument in arguments)


def refuse(config: Config, request: Request) -> None:
    """Reject keys that only a sweep reads. Raises UserError."""
    of_sweep = [o for o in request if _key(o).startswith("sweep.")]
    if config.sweep.name != "none":
        of_sweep.append(f"sweep={config.sweep.name}")
    if of_sweep:
        raise UserError(
            f"{of_sweep[0]}: takes no effect on one run. "
            "Put -m before it (python launch/run.py -m ...), or leave it out."
        )


def run(arguments: list[str]) -> int:
    """Return 0, or the first exit code of a trial that is not 0; 75 if interrupted."""
    request = Request(a for a in arguments if a not in ("-m", "--multirun"))
    request.print_warnings()
    command = read(request)
    config, host = command.config, detect.host(sys.executable)
    if config.mode == Mode.plan:
        return _plan(command, host)
    sweep_plan.look(command.to_run(), command.shared, host, whole=False, to_run=True)
    rundir.make(command.folder)
    with rundir.locked(command.folder):
        source = command.source()
        loop = Loop(config, command.folder, command.shared, source, host)
        with signals() as stopping:
            exit_code = loop.run(stopping)
    sweep_report.show_end(config, loop.content(), exit_code)
    return exit_code


def read(request: Request) -> Command:
    """Return the sweep of a command. Raises UserError."""
    fixed, grid = sweep_space.split(request)
    hydra_options.reject_hydra_keys(Request([*fixed, *grid[0]]))
    for override in grid[0]:
        if (key := _key(override)) in OF_THE_SWEEP or key.startswith("sweep."):
            raise UserError(f"{override}, ...: several values of {key}, but a sweep has one.")
    _check_names(fixed, grid)
    config = _compose_any(fixed, grid)
    sweep, name, inputs = config.sweep, config.name, list[Any]()
    typed = [o for o in fixed if _key(o).partition(".")[0] not in ("mode", "format", "sweep")]
    _check(config, typed, grid[0])
    if sweep.name == "none":
        identifying = sorted(o for o in typed if o.partition("=")[0] not in NOT_IDENTITY)
        name, inputs = name or "grid", [str(Path.cwd()), identifying, grid]
    else:
        # Trials with other fixed values belong to another search.
        config = compose([*sweep.overrides, *fixed])
        goal = [sweep.metric, sweep.direction.value, plain(sweep.space)]
        name, inputs = config.name or sweep.name, [identity(composition(config)), *goal]
        typed = [*sweep.overrides, *typed]
    # An equal sweep gets the same directory; with resume=never it gets a new one.
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]
    fresh = f"-{rundir.fresh_name()}" if config.resume == "never" else ""
    folder = Path(config.run_root) / "sweeps" / f"{name}-{digest}{fresh}"
    return Command(config, folder, typed, grid)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _check_names(fixed: list[str], grid: list[list[str]]) -> None:
    """Raise UserError for a parameter that the space does not have.

    Composing would report its value instead of its name.
    """
    of_space = [o for o in fixed if _key(o).startswith("sweep.space.")]
    if not of_space:
        return
    space = _compose_any([o for o in fixed if o not in of_space], grid).sweep.space
    for override in of_space:
        if (name := _key(override).split(".")[2]) not in space:
            raise UserError(
                f"{override}: sweep.space has no {name!r}.{near(name, space)} "
                f"To add one: '+sweep.space={{{name}: {{key: seed, values: [0, 1]}}}}'."
            )


def _compose_any(shared: list[str], grid: list[list[str]]) -> Config:
    """Return the first valid composition of a trial; all have the same sweep-wide keys.

    Raises the first trial's UserError if none is valid.
    """
    refusals = []
    for varied in grid:
        try:
            return compose([*shared, *varied])
        except UserError as error:
            refusals.append(error)
    raise refusals[0]


def _check(config: Config, typed: list[str], varied: list[str]) -> None:
    """Raise UserError for settings of a single run and for inconsistent settings of a sweep.

    `typed` are the overrides that all trials share, `varied` those of a grid's first trial.
    """
    sweep, is_search = config.sweep, config.sweep.name != "none"
    resume = {f"resume={config.resume}": config.resume not in ("auto", "never")}
    pipeline.refuse_keys_of_one_run(config, "-m starts many. Leave it out.", **resume)
    check_value("sweep.parallel", sweep.parallel, Range(least=1))
    check_value("sweep.num_trials", sweep.num_trials, Range(least=1))
    goal, fault = sweep_report.goal_of(sweep.metric), None
    by_key = {_key(override): override for override in typed}
    fixed = [n for n, parameter in sweep.space.items() if parameter.key in by_key]
    if goal is not None and goal != sweep.direction:
        fault = (
            f"sweep.direction={sweep.direction.value} with sweep.metric={sweep.metric}: the worst "
            f"trial would be selected. Use: sweep.direction={goal.value}."
        )
    elif sweep.space and not is_search:
        fault = (
            "sweep.space takes no effect on a grid. "
            "Use: sweep.name=<a name> sweep.metric=<a figure of the runs> for a search of it."
        )
    elif is_search and varied:
        fault = f"{varied[0]}: is for a grid, and sweep={sweep.name} is a search. Leave out one."
    elif is_search and fixed:
        override = by_key[sweep.space[fixed[0]].key]
        fault = (
            f"{override}: sweep={sweep.name} varies it. To hold it, add '~sweep.space.{fixed[0]}'."
        )
    if fault:
        raise UserError(fault)
    if is_search:
        sweep_space.check(sweep)


def _plan(command: Command, host: Host) -> int:
    """Show the plan. Return 2 if a rule rejects a trial of a grid, as the sweep would; else 0."""
    config = command.config
    planned = sweep_plan.look(
        command.to_run(sweep_plan.CHECKED), command.shared, host, whole=not command.is_search
    )
    source = command.source()
    trials = [*source.known, *(source.waiting if isinstance(source, Grid) else [])]
    content = sweep_report.as_object(
        command.folder, config.sweep, command.shared, trials, source.total
    )
    if planned is None:
        sweep_report.show_end(config, content, EXIT_DONE)
        return EXIT_DONE
    for number, reason in planned.refused.items():
        print(f"[{number}] {reason}", file=sys.stderr)
    sweep_plan.show(config, content, planned, host)
    return EXIT_USER if planned.refused and not command.is_search else EXIT_DONE
