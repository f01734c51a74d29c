"""Show mode=plan of a sweep: its space, its first trial's plan, and the trials that cannot run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from launch.config.identity import has_phases
from launch.config.request import Request
from launch.core.errors import HostError, UserError
from launch.core.json_files import plain
from launch.execution.execute import check_host, check_plan
from launch.machine.detect import Host
from launch.plan.show import say, short_path, show_plan
from launch.plan.views import as_json, pipeline_json
from launch.schema import Config
from launch.schema.enums import Format
from launch.search import fit
from launch.study.trial_loop import at_once, blocks
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


def look(
    trials: Iterable[Trial], shared: list[str], host: Host, whole: bool, to_run: bool = False
) -> Look | None:
    """Plan all of `trials` if `whole`, or those up to the first that is not rejected.

    `to_run` rejects also those that this host cannot run. Return None if there are no trials. Raise
    the first error if every trial is rejected.
    """
    ready: dict[int, Prepared] = {}
    refused: dict[int, UserError | HostError] = {}
    for trial in trials:
        try:
            planned = prepared(Request([*shared, *trial.varied]), host)
            for plan in planned.plans if to_run else ():
                # A Slurm job runs on another machine, where its own launcher checks the host.
                on_slurm = plan.config.runtime.name == "slurm"
                check_plan(plan) if on_slurm else check_host(plan, host)
            ready[trial.number] = planned
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


def show(config: Config, content: dict[str, Any], planned: Look, host: Host) -> None:
    """Show the space, the number of trials, how they are packed, the first plan, and failures."""
    sweep, first, total = config.sweep, planned.first, content["num_trials"]
    gpus, size = first.gpus_here(host, planned=True), first.num_gpus
    num_parallel = min(at_once(gpus, size, sweep.parallel), max(1, total))
    sets = blocks(gpus, size)[:num_parallel] if size else []
    if config.format == Format.json:
        run_dir = first.plans[-1].run_dir  # the first phases may lie in an earlier run
        plans = {plan.run_dir.name.partition("_")[2]: plan for plan in first.plans}
        added = {
            "schema": SCHEMA,
            "at_once": num_parallel,
            "gpu_sets": sets,
            "refused": planned.refused,
            "lacking": planned.lacking,
            "first": pipeline_json(run_dir.parent.parent.name, run_dir.parent, plans)
            if has_phases(first.config)
            else as_json(first.plans[0]),
        }
        print(json.dumps({**content, **added}, indent=1))
        return
    for name, parameter in sweep.space.items():
        fields = [f"{key} {v}" for key, v in plain(parameter).items() if v is not None]
        say(config, f"{name}: {', '.join(fields)}")
    goal = f", to {sweep.direction.value} {sweep.metric}" if sweep.metric else ""
    if len(planned.sizes) > 1:
        where = f", each on {' or '.join(map(str, sorted(planned.sizes)))} GPU(s)"
    else:
        where = f", {num_parallel} at once"
        names = "; ".join(",".join(map(str, gpus)) for gpus in sets)
        where += f", each on {size} GPU(s): {names}" if sets else ""
    say(config, f"{total} trials{goal}{where}, in {short_path(content['directory'])}")
    counts = Counter(row["status"] for row in content["trials"] if row["status"] != "waiting")
    if counts:
        begun = ", ".join(f"{count} {status}" for status, count in counts.items())
        say(config, f"Resumes: {begun}. Finished trials are not run again.")
    say(config, "The first to run:")
    console = Console(width=None if Console().is_terminal else 120)
    for plan in first.plans:
        show_plan(plan, console, config.verbose)
    for number, why in planned.lacking.items():
        say(config, f"! [{number}] {why}")
    if sweep.name == "none" and total > planned.num_planned:
        say(config, f"! Only the first {planned.num_planned} of {total} trials were planned.")
