"""The doctor's short set, before a run on GPUs: what takes no time to look at, and would make the run fail."""

from __future__ import annotations

import dataclasses
import sys
import time

from launch.checks import state, table
from launch.checks.facts import Facts, gather
from launch.checks.finding import Finding, Status
from launch.detect import Host
from launch.errors import HostError
from launch.plan import Plan
from launch.schema_enums import Preflight, Vendor

RELEASED_WITHIN_S = 5.0  # our choice: the driver takes back the memory of a process that has ended some time after its end
POLL_S = 0.2


def check(plan: Plan, host: Host) -> None:
    """Prints what may go wrong; raises HostError for what will, unless preflight=warn. Looks only at the GPUs that the plan uses."""
    config = plan.config
    if config.hardware.vendor == Vendor.none:
        return
    used = frozenset(gpu for process in plan.processes for gpu in process.gpus)
    seen = dataclasses.replace(host, gpus=host.gpus_of(config.hardware.vendor), environ={**host.environ, **config.user_env})
    facts = gather(seen, config.hardware, config.run_root, used)
    wait_until_released(facts, RELEASED_WITHIN_S if facts.is_live else 0.0)
    found = table.before_run(facts, contained=config.runtime.on_node == "docker")
    fails = {name: finding for name, finding in found.items() if finding.status == Status.fail}
    refused = config.preflight == Preflight.refuse
    for name, finding in found.items():
        if finding.status == Status.warn or (name in fails and not refused):
            print(f"warning: {_line(name, finding)}", file=sys.stderr)
    if fails and refused:
        lines = [_line(name, finding) for name, finding in fails.items()]
        last = "preflight=warn starts the run all the same; python launch/doctor.py shows everything that this machine was checked for."
        raise HostError("\n".join([*lines, last]))


def wait_until_released(facts: Facts, patience_s: float) -> None:
    """Until the GPUs are free, or the time is over: the run before this one may have ended a moment ago."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and (found := state.memory_occupied(facts)) and found.status == Status.fail:
        time.sleep(POLL_S)


def _line(name: str, finding: Finding) -> str:
    return f"{name}: {finding.read}. Expected: {finding.threshold} [{finding.source}]. {finding.cure}."
