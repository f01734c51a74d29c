"""Before a run: the doctor's short set on GPUs, what takes no time to look at and would make the run fail; on a CPU its memory."""

from __future__ import annotations

import dataclasses
import sys
import time

from launch.checks import state, table
from launch.checks.facts import Facts, gather
from launch.checks.finding import Finding, Status
from launch.errors import HostError
from launch.machine.detect import Host
from launch.machine.sysfs import total_memory
from launch.plan import Plan
from launch.schema.enums import Preflight, Vendor

RELEASED_WITHIN_S = 5.0  # our choice: the driver takes back the memory of a process that has ended some time after its end
POLL_S = 0.2


def check(plan: Plan, host: Host) -> None:
    """Prints what may go wrong; raises HostError for what will, unless preflight=warn. Looks only at the GPUs that the plan uses."""
    config = plan.config
    if config.hardware.vendor == Vendor.none:
        check_host_memory(plan, host)
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


def check_host_memory(plan: Plan, host: Host) -> None:
    """Of a CPU: a process that needs more than the whole machine has would take the machine down with it. Raises HostError.

    The plan's own capacity of a CPU is nominal, and processes share the memory: so only this is certain.
    """
    total = total_memory(host.sysroot)
    largest = max(plan.memory, key=lambda process: process.total_gb, default=None)
    if total is None or largest is None or largest.total_gb <= (there := total / 1e9):
        return
    said = f"{largest.process}: {largest.total_gb:.0f} GB of memory needed, and this machine has {there:.0f} GB"
    if plan.config.preflight == Preflight.refuse:
        raise HostError(f"{said}. Use: smoke=true, which makes it small; a smaller model; or preflight=warn, which starts it all the same.")
    print(f"warning: {said}", file=sys.stderr)


def wait_until_released(facts: Facts, patience_s: float) -> None:
    """Until the GPUs are free, or the time is over: the run before this one may have ended a moment ago."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and (found := state.memory_occupied(facts)) and found.status == Status.fail:
        time.sleep(POLL_S)


def _line(name: str, finding: Finding) -> str:
    return f"{name}: {finding.read}. Expected: {finding.threshold} [{finding.source}]. {finding.cure}."
