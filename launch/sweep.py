"""-m: many runs from one command. A grid of the command line's own lists, or a search (sweep=NAME) by Optuna.

Every trial is `python launch/run.py` as a process of its own, on GPUs that no other trial has. The same command goes on where it
stopped: a trial that is done is not run again.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.command_line import hydra_options
from launch.compose import compose
from launch.errors import EXIT_DONE, EXIT_USER, HostError, UserError, near
from launch.execute import check_host, signals
from launch.files import rundir
from launch.machine import detect
from launch.machine.detect import Host
from launch.plan import NOT_IDENTITY, composition, identity, plain
from launch.schema import Config
from launch.schema.enums import Find, Mode
from launch.sweeps import hydra as sweep_hydra
from launch.sweeps import plan as sweep_plan
from launch.sweeps import report as sweep_report
from launch.sweeps import space as sweep_space
from launch.sweeps.loop import Loop
from launch.sweeps.study import Grid, Search, Source, preview
from launch.sweeps.trials import Trial, prepared
from launch.trainer_args import known

OF_THE_SWEEP = ("mode", "format", "find", "resume", "data.preview")  # as every key of sweep.* is
TRIED = 5  # suggestions of a search that are looked at before it is refused as a whole


@dataclass(frozen=True)
class Command:
    """A sweep as it was typed. `shared` are the overrides of every trial, `grid` those that vary, `launcher` those of Hydra's launcher."""

    config: Config
    folder: Path
    shared: list[str]
    grid: list[list[str]]
    launcher: list[str]

    @property
    def is_search(self) -> bool:
        return self.config.sweep.name != "none"

    def source(self, keep: bool) -> Source:
        """The trials, kept in the sweep's folder; or (`keep` false) as they would come, with nothing written."""
        if not self.is_search:
            return Grid(self.grid)
        before = (rundir.read_json(self.folder / "sweep.json") or {}).get("trials")
        make = Search if keep else preview
        return make(self.config.sweep, self.config.seed, self.folder, before)


def wanted(arguments: list[str]) -> bool:
    return any(argument in ("-m", "--multirun") for argument in arguments)


def refuse(config: Config, overrides: list[str]) -> None:
    """Raises UserError for what only a sweep reads, where one run was asked for."""
    if config.sweep.name != "none":
        raise UserError(f"sweep={config.sweep.name}: a search of many runs. Put -m before it: python launch/run.py -m ...")
    of_sweep = next((o for o in overrides if o.lstrip("+~").startswith("sweep.")), None)
    if of_sweep:
        raise UserError(f"{of_sweep}: of a search or a grid, and this is one run. Put -m before it, or leave it out.")


def run(arguments: list[str]) -> int:
    """Returns 0, or the first exit code of a trial that is not 0; 75 where the sweep was interrupted."""
    flags = [a for a in arguments if a.startswith("-") and a not in ("-m", "--multirun")]
    if flags:
        raise UserError(f"{' '.join(flags)}: not together with -m, which takes overrides only.")
    command = read([a for a in arguments if not a.startswith("-")])
    host = detect.host(sys.executable)
    if command.config.mode == Mode.plan:
        return _plan(command, host)
    _check_ready(command, host)
    if not command.is_search and (line := sweep_plan.equal(command.grid)):
        sweep_report.say(command.config, line)
    rundir.make(command.folder)
    with rundir.locked(command.folder):
        source = command.source(keep=True)
        if command.launcher:
            exit_code = sweep_hydra.run(command.config, command.folder, command.shared, command.launcher, source, host)
        else:
            with signals() as stopping:
                exit_code = Loop(command.config, command.folder, command.shared, source, host).run(stopping)
    content = sweep_report.as_object(command.folder, command.config.sweep, command.shared, source.known, source.total)
    sweep_report.show_end(command.config, content, exit_code)
    return exit_code


def read(overrides: list[str]) -> Command:
    """Raises UserError for a sweep that cannot be."""
    fixed, grid = sweep_space.split(overrides)
    launcher = [o for o in fixed if o.startswith(("hydra/launcher=", "hydra.launcher.", "+hydra.launcher."))]
    fixed = [o for o in fixed if o not in launcher]
    for override in fixed:
        if override.startswith(("hydra/sweeper", "hydra.sweep")):
            raise UserError(f"{override}: sweeps are our own here (docs/sweeps.md says why). A search is sweep=NAME.")
    hydra_options.refuse([*fixed, *grid[0]])
    about_sweep = [o for o in fixed if o.lstrip("+~").startswith(("sweep=", "sweep."))]
    fixed = [o for o in fixed if o not in about_sweep]
    _check_names(fixed, about_sweep, grid)
    _check_varied(grid)
    config = _any_of([*fixed, *about_sweep], grid)
    if config.data.preview:
        raise UserError("data.preview: of one run, which it shows and does not start. Leave out -m, or data.preview.")
    if config.find != Find.none:
        raise UserError(f"find={config.find.value}: of one run, and -m starts many. Leave out -m, or find.")
    if config.resume not in ("auto", "never"):
        raise UserError(f"resume={config.resume}: of one run, and -m starts many. Give auto or never.")
    if config.sweep.parallel is not None and config.sweep.parallel < 1:
        raise UserError(f"sweep.parallel={config.sweep.parallel}: out of range. Use: at least 1.")
    goal = sweep_report.goal_of(config.sweep.metric)
    if goal is not None and goal != config.sweep.direction:
        given = f"sweep.metric={config.sweep.metric} with sweep.direction={config.sweep.direction.value}"
        raise UserError(f"{given}: the worst trial would be called the best. Use: sweep.direction={goal.value} beside it.")
    typed = [o for o in fixed if o.partition("=")[0] not in ("mode", "format")]  # of the sweep, not of a trial
    if config.sweep.name == "none":
        return _grid(config, typed, grid, [o for o in launcher if o != "hydra/launcher=basic"])
    return _search(config, typed, grid, launcher, [*fixed, *about_sweep])


def _check_varied(grid: list[list[str]]) -> None:
    """Refuse lists of keys that say how the sweep itself goes: the first value would be taken for all."""
    for override in grid[0]:
        key = override.lstrip("+~").partition("=")[0]
        if key in OF_THE_SWEEP or key.startswith("sweep."):
            raise UserError(f"{override}, ...: several values of {key}, which is one for the whole sweep. Give one.")


def _check_names(fixed: list[str], about_sweep: list[str], grid: list[list[str]]) -> None:
    """Refuse a parameter that the space does not have, which Hydra would do in words about dictionaries."""
    named = {m.group(1): o for o in about_sweep if (m := re.match(r"[+~]*sweep\.space\.([^.=]+)", o))}
    if not named:
        return
    others = [o for o in about_sweep if o not in named.values() and not re.match(r"[+~]*sweep\.space\.", o)]
    known = _any_of([*fixed, *others], grid).sweep.space
    for name, override in named.items():
        if name not in known:
            add = f"To add one: '+sweep.space={{{name}: {{key: seed, values: [0, 1]}}}}'"
            raise UserError(f"{override}: no parameter {name!r} in sweep.space.{near(name, known)} {add}.")


def _any_of(shared: list[str], grid: list[list[str]]) -> Config:
    """The composition of the first trial that has one: the keys of the sweep itself are the same in all."""
    refused: UserError | None = None
    for varied in grid:
        try:
            return compose([*shared, *varied])
        except UserError as error:
            refused = refused or error
    raise refused or UserError("-m: no trial.")


def _grid(config: Config, shared: list[str], grid: list[list[str]], launcher: list[str]) -> Command:
    kept = sorted(o for o in shared if o.partition("=")[0] not in NOT_IDENTITY)
    folder = _folder(config, config.name or "grid", [str(Path.cwd()), kept, grid])
    return Command(config, folder, shared, grid, launcher)


def _search(config: Config, typed: list[str], grid: list[list[str]], launcher: list[str], everything: list[str]) -> Command:
    sweep = config.sweep
    if len(grid) > 1:
        raise UserError(f"{' '.join(grid[0])}, ...: several values, and sweep={sweep.name} has a space of its own. Leave one of them out.")
    if launcher:
        raise UserError(f"{launcher[0]}: for a grid. The trials of sweep={sweep.name} follow from one another, and start themselves.")
    sweep_space.check(sweep)
    given = {o.lstrip("+").partition("=")[0]: o for o in typed}
    for name, parameter in sweep.space.items():
        if parameter.key in given:
            raise UserError(f"{given[parameter.key]}: sweep={sweep.name} varies it. To hold it: '~sweep.space.{name}' beside it.")
    config = compose([*sweep.overrides, *everything])  # a search is the same only while every value that it holds is
    _check_space_of_method(config, everything)
    searched = [sweep.metric, sweep.direction.value, plain(sweep.space)]
    folder = _folder(config, config.name or sweep.name, [identity(composition(config)), *searched])
    return Command(config, folder, [*sweep.overrides, *typed], [[]], [])


def _check_space_of_method(config: Config, given: list[str]) -> None:
    """Refuse a sweep's own parameter that the method does not have: nobody typed it, so the message names the sweep."""
    sweep, arguments = config.sweep, known(config)
    for name, parameter in sweep.space.items():
        key, _, argument = parameter.key.rpartition(".")
        if key != "method.args" or argument in arguments or any(o.lstrip("+").startswith(f"sweep.space.{name}") for o in given):
            continue
        own = next((o for o in sweep.overrides if o.startswith("method=")), None)
        remedy = f"{own}, which sweep={sweep.name} is of" if own else f"another method, or '~sweep.space.{name}' beside it"
        why = f"sweep={sweep.name} varies it, and method={config.method.name} has no such argument"
        raise UserError(f"{parameter.key}: {why}. Use: {remedy}.")


def _folder(config: Config, name: str, same: object) -> Path:
    """Of a sweep: the same again for what is `same`, a new one under resume=never."""
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:8]
    fresh = f"-{rundir.fresh_name()}" if config.resume == "never" else ""
    return Path(config.run_root) / "sweeps" / f"{name}-{digest}{fresh}"


def _candidates(command: Command, most: int | None = None) -> Iterator[Trial]:
    """Trials that are still to run: all of a grid, or `most` of it; the next few of a search."""
    source = command.source(keep=False)
    for _ in range(TRIED if command.is_search else min(source.total, most or source.total)):
        trial = source.next()
        if trial is None:
            return
        yield trial


def _check_ready(command: Command, host: Host) -> None:
    """Raises the first refusal where every trial is refused, by a rule or because this host cannot run it."""
    refused: UserError | HostError | None = None
    for trial in _candidates(command):
        try:
            for plan in prepared([*command.shared, *trial.varied], host).plans:
                check_host(plan, host)
            return
        except (UserError, HostError) as error:
            refused = refused or error
    if refused:
        raise refused


def _plan(command: Command, host: Host) -> int:
    """Show it. A grid of which a trial is refused ends with 2, as the sweep would; what does not fit ends with 0, as a single plan."""
    config = command.config
    planned = sweep_plan.look(_candidates(command, sweep_plan.CHECKED), command.shared, host, whole=not command.is_search)
    refused = sweep_plan.say_refused(planned)
    source = command.source(keep=False)
    trials = [*source.known, *(source.waiting if isinstance(source, Grid) else [])]
    content = sweep_report.as_object(command.folder, config.sweep, command.shared, trials, source.total)
    if not planned:
        sweep_report.show_end(config, content, EXIT_DONE)
    else:
        said = {} if command.is_search else sweep_plan.advice(planned, command.shared, host)
        packed = sweep_plan.packing(config.sweep, planned, host, content["num_trials"], command.launcher)
        sweep_plan.show(config, content, packed, planned, said)
    return EXIT_USER if refused and not command.is_search else EXIT_DONE
