"""Before a run, check the GPUs (`before_run` in checks.yaml) or, on a CPU, the memory."""

from __future__ import annotations

import dataclasses
import sys
import time

from launch.checks import check_table, state
from launch.checks.facts import Facts, gather
from launch.checks.finding import Status
from launch.core.errors import HostError
from launch.machine.detect import Host
from launch.machine.sysfs import total_memory
from launch.schema.enums import Preflight, Vendor
from launch.schema.plan import Plan

# Our choice: the driver frees a process's memory a moment after the process exits.
RELEASED_WITHIN_S = 5.0
POLL_S = 0.2


def check(plan: Plan, host: Host) -> None:
    """Check the plan's GPUs. Print warnings; raise HostError for failures unless preflight=warn."""
    config = plan.config
    if config.hardware.vendor == Vendor.none:
        check_host_memory(plan, host)
        return
    gpus = frozenset(gpu for process in plan.processes for gpu in process.gpus)
    environ = {**host.environ, **config.user_env}
    masked = dataclasses.replace(host, gpus=host.gpus_of(config.hardware.vendor), environ=environ)
    facts = gather(masked, config.hardware, config, gpus)
    wait_until_released(facts, RELEASED_WITHIN_S if facts.is_live else 0.0)
    errors = []
    for name, finding in check_table.before_run(facts, config.runtime.in_container).items():
        line = (
            f"{name}: {finding.read}. Expected: {finding.threshold} [{finding.source}]. "
            f"{finding.cure}."
        )
        if finding.status == Status.fail and config.preflight == Preflight.refuse:
            errors.append(line)
        elif finding.status in (Status.fail, Status.warn):
            print(f"warning: {line}", file=sys.stderr)
    if errors:
        hint = "preflight=warn starts the run anyway. python launch/doctor.py shows all checks."
        raise HostError("\n".join([*errors, hint]))


def check_host_memory(plan: Plan, host: Host) -> None:
    """Raise HostError if a process needs more memory than the machine has in total."""
    memory = total_memory(host.sysroot)
    largest = max(plan.memory, key=lambda process: process.total_gb, default=None)
    if memory is None or largest is None or largest.total_gb <= memory / 1e9:
        return
    shortage = (
        f"{largest.process} needs {largest.total_gb:.0f} GB of memory, but this machine has "
        f"{memory / 1e9:.0f} GB"
    )
    if plan.config.preflight == Preflight.refuse:
        smaller = "smoke=true, which shrinks the run; a smaller model"
        if plan.config.model.path:
            smaller = "smoke=true without model.path, whose model it would not shrink"
        raise HostError(f"{shortage}. Use: {smaller}; or preflight=warn, which starts it anyway.")
    print(f"warning: {shortage}", file=sys.stderr)


def wait_until_released(facts: Facts, timeout_s: float) -> None:
    """Wait up to `timeout_s` for free GPUs, because another run may have just ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        finding = state.memory_occupied(facts)
        if finding is None or finding.status != Status.fail:
            return
        time.sleep(POLL_S)
