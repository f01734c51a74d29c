"""Show mode=plan of a sweep: its space, its first trial's plan, and the trials that cannot run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from launch.config.identity import has_phases
from launch.config.request import Request
from launch.core.errors import HostError, UserError
from launch.core.json_files import plain
from launch.machine.detect import Host
from launch.plan.show import show_plan
from launch.plan.views import as_json, pipeline_json
from launch.schema import Config, Parameter, Sweep
from launch.schema.enums import Format
from launch.search import fit
from launch.study.pool import at_once, pack
from launch.study.sweep_report import relative, say
from launch.study.trials import Prepared, Trial, prepared

SCHEMA = 2  # 1 had a row for every trial
CHECKED = 200  # trials planned, each in a fiftieth of a second, a pipeline in a tenth


@dataclass(frozen=True)
class Look:
    """Result of planning trials. `refused` and `lacking` map a trial's number to the reason."""

    first: Prepared
    num_planned: int
    sizes: set[int]  # GPUs that a trial takes
    refused: dict[int, str]
    lacking: dict[int, str]


def look(trials: Iterable[Trial], shared: list[str], host: Host, whole: bool) -> Look | None:
    """Plan all of `trials` if `whole`, or those up to the first that is not rejected.

    Return None if there are no trials. Raise the first error if every trial is rejected.
    """
    ready: dict[int, Prepared] = {}
    refused: dict[int, UserError | HostError] = {}
    for trial in trials:
        try:
            ready[trial.number] = prepared(Request([*shared, *trial.varied]), host)
        except (UserError, HostError) as error:
            refused[trial.number] = error
        if ready and not whole:
            break
    if not ready:
        if refused:
            raise next(iter(refused.values()))
        return None
    shortages = {
        number: " ".join(filter(None, (fit.shortage(p) for p in trial.plans if not p.is_left_out)))
        for number, trial in ready.items()
    }
    return Look(
        first=next(iter(ready.values())),
        num_planned=len(ready) + len(refused),
        sizes={trial.num_gpus for trial in ready.values()},
        refused={number: str(error) for number, error in refused.items()},
        lacking={number: why for number, why in shortages.items() if why},
    )


def show(
    config: Config, content: dict[str, Any], planned: Look, host: Host, launcher: str | None
) -> None:
    """Show the space, the number of trials, how they are packed, the first plan, and failures."""
    sweep, first, total = config.sweep, planned.first, content["num_trials"]
    together, sets = packing(sweep, first, host, total)
    if config.format == Format.json:
        added = {
            "schema": SCHEMA,
            "space": plain(sweep.space),
            "at_once": together,
            "gpu_sets": [] if launcher else sets,
            "refused": planned.refused,
            "lacking": planned.lacking,
            "first": _first_json(first),
        }
        print(json.dumps({**content, **added}, indent=1))
        return
    for name, parameter in sweep.space.items():
        say(config, f"{name}: {parameter.key} = {_tried(parameter)}")
    goal = f", to {sweep.direction.value} {sweep.metric}" if sweep.metric else ""
    where = (
        f"a job for each, all handed to {launcher}"
        if launcher
        else _where(first, planned.sizes, together, sets)
    )
    say(config, f"{total} trials{goal}, {where}, in {relative(content['directory'])}")
    begun = [row["status"] for row in content["trials"] if row["status"] != "waiting"]
    if begun:
        counts = ", ".join(f"{begun.count(status)} {status}" for status in dict.fromkeys(begun))
        say(config, f"Resumes: {counts}. Finished trials are not run again.")
    say(config, "The first to run:")
    console = Console(width=None if Console().is_terminal else 120)
    for plan in first.plans:
        show_plan(plan, console, config.verbose)
    for number, why in planned.lacking.items():
        say(config, f"! [{number}] {why}")
    if sweep.name == "none" and total > planned.num_planned:
        say(config, f"! Only the first {planned.num_planned} of {total} trials were planned.")


def packing(sweep: Sweep, first: Prepared, host: Host, total: int) -> tuple[int, list[list[int]]]:
    """Return how many trials like the first run at once, and the GPUs that each gets."""
    gpus, size = first.gpus_here(host, planned=True), first.num_gpus
    together = min(at_once(gpus, size, sweep.parallel), max(1, total))
    sets: list[list[int]] = []
    while size and len(sets) < together and (block := pack(gpus, sum(sets, []), size)):
        sets.append(block)
    return together, sets


def _where(first: Prepared, sizes: set[int], together: int, sets: list[list[int]]) -> str:
    config = first.plans[0].config
    turns = "one after another" if together == 1 else f"{together} at once"
    if config.runtime.name == "slurm":
        more = "" if together > 1 else " (sweep.parallel=N: N jobs at a time)"
        return f"{turns}, each a Slurm job{more}"
    if len(sizes) > 1:
        each = " or ".join(map(str, sorted(sizes)))
        return f"as many at once as there is room for, each on {each} GPU(s)"
    if not first.num_gpus:
        return f"{turns} on the CPU"
    blocks = "; ".join(",".join(map(str, block)) for block in sets)
    return f"{turns}, each on {first.num_gpus} GPU(s): {blocks}"


def _first_json(first: Prepared) -> dict[str, Any]:
    if not has_phases(first.config):
        return as_json(first.plans[0])
    run_dir = first.plans[-1].run_dir  # the first phases may lie in an earlier run
    plans = {plan.run_dir.name.partition("_")[2]: plan for plan in first.plans}
    return pipeline_json(run_dir.parent.parent.name, run_dir.parent, plans)


def _tried(parameter: Parameter) -> str:
    if parameter.values is not None:
        return ", ".join(map(str, parameter.values))
    kind = "uniform in the logarithm" if parameter.log else "uniform"
    whole = "whole numbers, " if parameter.integer else ""
    return f"{parameter.low:g} to {parameter.high:g}, {whole}{kind}"
