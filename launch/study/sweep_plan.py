"""Show mode=plan of a sweep: its space, the plan of its first trial, and trials that cannot run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from launch.config.identity import has_phases
from launch.config.request import Request
from launch.core.errors import HostError, UserError
from launch.core.json_files import plain
from launch.execution.execute import check_host, check_plan
from launch.machine.detect import Host
from launch.plan import plan_page
from launch.plan.next_steps import short_path
from launch.plan.predictions import phase_name
from launch.plan.show import print_warnings, say, say_next_run
from launch.plan.views import as_json, pipeline_json, shared_warnings
from launch.schema import Config
from launch.schema.enums import Format
from launch.search import fit
from launch.study.trial_loop import gpu_blocks, num_parallel
from launch.study.trials import PlannedTrial, Trial, plan_trial

SCHEMA = 2
CHECKED = 200  # trials to plan, in 20 ms each, or 100 ms for a pipeline


@dataclass(frozen=True)
class TrialPlans:
    """The result of planning trials. `rejected` and `shortages` map trial numbers to reasons."""

    first: PlannedTrial
    num_planned: int
    sizes: set[int]  # numbers of GPUs per trial
    rejected: dict[int, str]
    shortages: dict[int, str]


def plan_trials(
    trials: Iterable[Trial],
    shared: list[str],
    host: Host,
    plan_all: bool,
    check_hosts: bool = False,
) -> TrialPlans | None:
    """Plan all of `trials` if `plan_all`, or those up to the first that is not rejected.

    `check_hosts` also rejects trials that this host cannot run. Return None if `trials` is
    empty. If all are rejected, raise the first error.
    """
    planned_trials: dict[int, PlannedTrial] = {}
    rejected: dict[int, UserError | HostError] = {}
    for trial in trials:
        try:
            planned = plan_trial(Request([*shared, *trial.varied]), host)
            for plan in planned.plans if check_hosts else ():
                # The launcher in a Slurm job checks its own host.
                on_slurm = plan.config.runtime.name == "slurm"
                check_plan(plan) if on_slurm else check_host(plan, host)
            planned_trials[trial.number] = planned
        except (UserError, HostError) as error:
            rejected[trial.number] = error
        if planned_trials and not plan_all:
            break
    if not planned_trials:
        if rejected:
            raise next(iter(rejected.values()))
        return None
    shortages = {
        number: " ".join(filter(None, (fit.shortage(p) for p in trial.plans if not p.is_left_out)))
        for number, trial in planned_trials.items()
    }
    return TrialPlans(
        first=next(iter(planned_trials.values())),
        num_planned=len(planned_trials) + len(rejected),
        sizes={trial.num_gpus for trial in planned_trials.values()},
        rejected={number: str(error) for number, error in rejected.items()},
        shortages={number: why for number, why in shortages.items() if why},
    )


def show(
    request: Request, config: Config, content: dict[str, Any], planned: TrialPlans, host: Host
) -> None:
    """Show the space, the trials and their GPUs, the plan of the next trial, and shortages."""
    sweep, first, total = config.sweep, planned.first, content["num_trials"]
    gpus, size = first.gpus_here(host, planned=True), first.num_gpus
    num_running = min(num_parallel(gpus, size, sweep.parallel), max(1, total))
    sets = gpu_blocks(gpus, size)[:num_running] if size else []
    is_pipeline, plans = has_phases(first.config), {phase_name(plan): plan for plan in first.plans}
    run_dir = first.plans[-1].run_dir  # the first phases may be reused from an earlier run
    if config.format == Format.json:
        added = {
            "schema": SCHEMA,
            "at_once": num_running,
            "gpu_sets": sets,
            "refused": planned.rejected,
            "lacking": planned.shortages,
            "first": pipeline_json(run_dir.parent.parent.name, run_dir.parent, plans)
            if is_pipeline
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
        where = f", {num_running} in parallel"
        names = "; ".join(",".join(map(str, gpus)) for gpus in sets)
        where += f", each on {size} GPU(s): {names}" if sets else ""
    say(config, f"{total} trials{goal}{where}, in {short_path(content['directory'])}")
    counts = Counter(row["status"] for row in content["trials"] if row["status"] != "waiting")
    if counts:
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        say(config, f"Resuming the sweep: {statuses}. Finished trials are not run again.")
    say(config, "Plan of the next trial:")
    if is_pipeline:
        lines = plan_page.pipeline_page(run_dir.parent, first.plans, host, config.verbose)
    else:
        lines = plan_page.page(first.plans[0], host, config.verbose)
    say(config, "\n".join(lines))
    print_warnings(config, shared_warnings(plans) if is_pipeline else first.plans[0].warnings)
    print_warnings(config, [f"[{number}] {why}" for number, why in planned.shortages.items()])
    if sweep.name == "none" and total > planned.num_planned:
        say(config, f"! Only the first {planned.num_planned} of {total} trials were planned.")
    say_next_run(first.config, host, request, "-m")
