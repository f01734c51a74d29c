"""mode=plan of a sweep: its space or every trial of its grid, what fits, how they are packed, what all of it takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch import topology
from launch.errors import HostError, UserError
from launch.machine.detect import Host
from launch.plan import Plan, as_json, has_phases, pipeline_json, plain
from launch.planner import fit, margin
from launch.planner.memory import Memory
from launch.schema import Config, Parameter, Sweep
from launch.schema.enums import Format, Vendor
from launch.show import show_plan
from launch.sweeps.pool import at_once, pack
from launch.sweeps.report import relative, say, short
from launch.sweeps.trials import Prepared, Trial, prepared

CHECKED = 200  # trials of a grid that are planned: a fiftieth of a second each, of a pipeline a tenth
SHOWN = 20  # rows of the table; those that need a change are named whatever their number
SEARCHED = 3  # shortages for which changes are looked for: seconds each


@dataclass(frozen=True)
class Planned:
    """A trial of a grid: its plans, or what it is refused for. `same_as` is an earlier trial that is the same run."""

    trial: Trial
    found: Prepared | None
    refused: UserError | HostError | None = None
    same_as: int | None = None

    @property
    def memory(self) -> Memory | None:
        """The process that has least to spare, of all phases."""
        return margin.tightest(m for plan in self._plans for m in plan.memory)

    @property
    def shortage(self) -> str | None:
        """Who lacks how much, of a pipeline after the phase."""
        said = []
        for plan in self._plans:
            if lacking := fit.shortage(plan):
                phase = plan.run_dir.name.partition("_")[2] if self.found and has_phases(self.found.config) else ""
                said.append(f"phase {phase}: {lacking}" if phase else lacking)
        return " ".join(said) or None

    @property
    def hours(self) -> float | None:
        """Of training, over all phases that train; None where one of them is not known."""
        return _sum(plan.speed.run_hours for plan in self._plans if plan.config.method.kind == "trainer")

    @property
    def cost(self) -> float | None:
        return _sum(plan.speed.cost for plan in self._plans if plan.config.method.kind == "trainer")

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        if self.same_as is not None:
            return f"the same as {self.same_as}"
        if self.shortage:
            return "does not fit"
        if self.memory is None or not self.found or self.found.config.hardware.vendor == Vendor.none:
            return ""  # a CPU's memory is not the planner's business
        return "fits, barely" if margin.close(self.memory) else "fits"

    @property
    def _plans(self) -> list[Plan]:
        return [plan for plan in self.found.plans if not plan.is_left_out] if self.found else []

    def as_json(self) -> dict[str, Any]:
        needs = self.memory
        return {
            "number": self.trial.number,
            "verdict": self.verdict,
            "needed_gb": needs and needs.total_gb,
            "capacity_gb": needs and needs.capacity_gb,
            "hours": self.hours,
            "cost": self.cost,
            "same_as": self.same_as,
        }


def _sum(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return sum(v for v in found if v is not None) if found and None not in found else None


def look(candidates: Iterable[Trial], shared: list[str], host: Host, whole: bool) -> list[Planned]:
    """Candidates, planned: all of them (`whole`), or those up to the first that is not refused. Raises the first refusal where all are."""
    found: list[Planned] = []
    numbers: dict[str, int] = {}
    for trial in candidates:
        try:
            ready = prepared([*shared, *trial.varied], host)
        except (UserError, HostError) as error:
            found.append(Planned(trial, None, error))
            continue
        known = numbers.setdefault(ready.composition_hash, trial.number)
        found.append(Planned(trial, ready, same_as=None if known == trial.number else known))
        if not whole:
            break
    refused = [one.refused for one in found if one.refused]
    if refused and len(refused) == len(found):
        raise refused[0]
    return found


def equal(grid: list[list[str]]) -> str | None:
    """A line about trials that were typed twice; None where all differ."""
    typed = [tuple(sorted(varied)) for varied in grid]
    again = [f"{number} as {typed.index(one)}" for number, one in enumerate(typed) if typed.index(one) != number]
    return f"Trials that stand twice in the lists: {', '.join(again[:SHOWN])}{' ...' if len(again) > SHOWN else ''}." if again else None


def advice(found: list[Planned], shared: list[str], host: Host) -> dict[str, list[int]]:
    """What is said of trials that do not fit, as their own plans would -> their numbers. Those that lack the same are told once."""
    alike: dict[str, list[Planned]] = {}
    for one in found:
        if one.shortage:
            alike.setdefault(one.shortage, []).append(one)
    said: dict[str, list[int]] = {}
    for count, (lacking, trials) in enumerate(alike.items()):
        first = trials[0].found
        assert first is not None
        if has_phases(first.config):
            text: str | None = lacking
        elif count < SEARCHED:
            text = fit.advice(first.plans[0], [*shared, *trials[0].trial.varied], host)
        else:
            text = f"{lacking} mode=plan of this trial alone looks for changes that make it fit."
        said[text or lacking] = [one.trial.number for one in trials]
    return said


@dataclass(frozen=True)
class Packing:
    """How many trials run at once, and on which GPUs of this host. `sizes` are the GPUs that trials take; `launcher` is Hydra's."""

    first: Prepared
    together: int
    sets: list[list[int]]
    sizes: list[int]
    launcher: str | None

    def __str__(self) -> str:
        config = self.first.plans[0].config
        one = "one after another" if self.together == 1 else f"{self.together} at once"
        if self.launcher:
            return f"a job for each, all handed to {self.launcher}"
        if config.runtime.name == "slurm":
            more = "" if self.together > 1 else " (sweep.parallel=N: N jobs at a time)"
            return f"{one}, each a Slurm job with {_of_job(config)}{more}"
        if len(self.sizes) > 1:
            return f"as many at once as there is room for, each on {' or '.join(map(str, self.sizes))} GPU(s)"
        if not self.first.num_gpus:
            return f"{one} on the CPU"
        return f"{one}, each on {self.first.num_gpus} GPU(s): {'; '.join(','.join(map(str, s)) for s in self.sets)}"


def _of_job(config: Config) -> str:
    nodes, gpus = config.runtime.slurm.nodes, 0 if config.hardware.vendor == Vendor.none else topology.num_gpus(config)
    here = f"{gpus} GPU(s)" if gpus else "no GPU"
    return f"{nodes} nodes of {here}" if nodes > 1 else here


def packing(sweep: Sweep, found: list[Planned], host: Host, total: int, launcher: list[str]) -> Packing:
    """Of trials like the first that is not refused. Where they take different numbers of GPUs, the sweep packs each when its turn comes."""
    ready = [one.found for one in found if one.found]
    first, sizes = ready[0], sorted({one.num_gpus for one in ready})
    gpus, wanted = first.gpus_here(host, planned=True), first.num_gpus
    together = min(at_once(gpus, wanted, sweep.parallel), max(1, total))
    sets: list[list[int]] = []
    while wanted and not launcher and len(sets) < together and (block := pack(gpus, {gpu for s in sets for gpu in s}, wanted)):
        sets.append(block)
    return Packing(first, together, sets, sizes, launcher[0] if launcher else None)


def show(config: Config, content: dict[str, Any], packed: Packing, found: list[Planned], said: dict[str, list[int]]) -> None:
    """The space, how many trials, how they are packed, the plan of the first that is not refused; of a grid all that were planned."""
    is_search = config.sweep.name != "none"
    if config.format == Format.json:
        print(json.dumps({**content, **_json(config, content, packed, found, said, is_search)}, indent=1))
        return
    sweep, console = config.sweep, Console(width=None if Console().is_terminal else 120)
    if sweep.space:
        table = Table("parameter", "key", "tried", title=f"Space of {sweep.name}", title_justify="left")
        for name, parameter in sweep.space.items():
            table.add_row(name, parameter.key, Text(_tried(parameter)))
        console.print(table)
    goal = f", to {sweep.direction.value} {sweep.metric}" if sweep.metric else ""
    say(config, f"{content['num_trials']} trials{goal}, {packed}, in {relative(content['directory'])}")
    begun = [row["status"] for row in content["trials"] if row["status"] != "waiting"]
    if begun:
        counts = ", ".join(f"{begun.count(status)} {status}" for status in ("done", "failed", "interrupted") if status in begun)
        say(config, f"Continues: {counts}; what is done is not run again.")
    say(config, "The first to run:")
    for plan in packed.first.plans:
        show_plan(plan, console, config.verbose)
    if is_search:
        return
    console.print(_table(found, content["num_trials"]))
    for line in _lines(config, content["num_trials"], packed, found, said):
        say(config, line)


def _json(
    config: Config, content: dict[str, Any], packed: Packing, found: list[Planned], said: dict[str, list[int]], is_search: bool
) -> dict[str, Any]:
    first = packed.first
    run_dir = first.plans[-1].run_dir  # the first phases may lie in an earlier run
    plans = {plan.run_dir.name.partition("_")[2]: plan for plan in first.plans} if has_phases(first.config) else {}
    shown = pipeline_json(run_dir.parent.parent.name, run_dir.parent, plans) if plans else as_json(first.plans[0])
    refused = {one.trial.number: str(one.refused) for one in found if one.refused}
    added = {"space": plain(config.sweep.space), "at_once": packed.together, "gpu_sets": packed.sets, "refused": refused, "first": shown}
    if is_search:
        return added
    to_run = _to_run(config, found)
    whole = {
        "planned": [one.as_json() for one in found],
        "not_planned": content["num_trials"] - len(found),
        "advice": [{"trials": numbers, "said": text} for text, numbers in said.items()],
        "hours": _sum(one.hours for one in to_run),
        "cost": _sum(one.cost for one in to_run),
    }
    return {**added, **whole}


def _to_run(config: Config, found: list[Planned]) -> list[Planned]:
    """Trials that take time: those that start, each run once. resume=never runs equal ones again."""
    starts = [one for one in found if not one.refused and not one.shortage]
    return [one for one in starts if one.same_as is None or config.resume == "never"]


def _table(found: list[Planned], total: int) -> Table:
    rows = found[:SHOWN]
    timed, priced = any(one.hours is not None for one in rows), any(one.cost is not None for one in rows)
    table = Table("trial", "overrides", "memory of one GPU", "", title="Trials", title_justify="left")
    for header in [*(["hours of training"] if timed else []), *(["cost"] if priced else [])]:
        table.add_column(header, justify="right")
    for one in rows:
        needs = one.memory
        size = f"{needs.total_gb:.1f} of {needs.capacity_gb:.1f} GB" if needs else "" if one.refused else "not planned"
        verdict = Text(one.verdict, style="red" if one.refused or one.shortage else "yellow" if one.verdict != "fits" else "green")
        figures = [*([_figure(one.hours)] if timed else []), *([_figure(one.cost)] if priced else [])]
        figures = [""] * len(figures) if one.refused else figures
        table.add_row(str(one.trial.number), Text(short(one.trial.varied)), size, verdict, *figures)
    if total > len(rows):
        table.add_row("...", f"{total - len(rows)} more")
    return table


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _lines(config: Config, total: int, packed: Packing, found: list[Planned], said: dict[str, list[int]]) -> list[str]:
    """What the table does not say: remedies, equal trials, what was not planned, the sum."""
    lines = [f"! [{_numbers(numbers)}] {text}" for text, numbers in said.items()]
    barely = [one.trial.number for one in found if one.verdict == "fits, barely"]
    if barely:
        less = f"the {margin.ERROR:.0%} that the planner may err by, or than torch's allocator may hold besides"
        lines.append(f"! [{_numbers(barely)}] fit by less than {less} (docs/memory.md).")
    again = [one for one in found if one.same_as is not None]
    if again:
        pairs = ", ".join(f"{one.trial.number} as {one.same_as}" for one in again[:SHOWN])
        once = "resume=never runs each of them" if config.resume == "never" else "they run once"
        lines.append(f"! Trials that are the same run: {pairs}{' ...' if len(again) > SHOWN else ''}; {once}.")
    if total > len(found):
        lines.append(f"! The first {len(found)} trials were planned; the other {total - len(found)} were not looked at.")
    return lines + _total(config, total, packed, found)


def _total(config: Config, total: int, packed: Packing, found: list[Planned]) -> list[str]:
    to_run = _to_run(config, found)
    known = [one for one in to_run if one.hours is not None]
    if not known:
        return []
    hours, cost = sum(one.hours or 0.0 for one in known), _sum(one.cost for one in known)
    of = f"{len(known)} trials" if len(known) == total else f"{len(known)} of {total} trials"
    together = min(packed.together, len(known)) if len(packed.sizes) == 1 and not packed.launcher else 1
    wall = f", about {_figure(hours / together)} h with {together} at once" if together > 1 else ""
    costs = f"; costs {_figure(cost)}" if cost is not None else ""
    return [f"Training in all, {of}: {_figure(hours)} h{wall}{costs}"]


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else "")


def _tried(parameter: Parameter) -> str:
    if parameter.values is not None:
        return ", ".join(map(str, parameter.values))
    kind = ("whole numbers, " if parameter.integer else "") + ("uniform in the logarithm" if parameter.log else "uniform")
    return f"{parameter.low:g} to {parameter.high:g}, {kind}"


def say_refused(found: list[Planned]) -> bool:
    """On stderr, each with its number. Whether there are any."""
    refused = [one for one in found if one.refused]
    for one in refused:
        print(f"[{one.trial.number}] {one.refused}", file=sys.stderr)
    return bool(refused)
