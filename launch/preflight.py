"""The doctor's short set, before a run on GPUs: what takes no time to look at, and would make the run fail."""

from __future__ import annotations

import dataclasses
import sys

from launch.checks import table
from launch.checks.facts import gather
from launch.checks.finding import Status
from launch.detect import Host
from launch.errors import HostError
from launch.plan import Plan
from launch.schema_enums import Vendor


def check(plan: Plan, host: Host) -> None:
    """Prints what may go wrong; raises HostError for what will. Looks only at the GPUs that the plan uses."""
    config = plan.config
    if config.hardware.vendor == Vendor.none:
        return
    used = frozenset(gpu for process in plan.processes for gpu in process.gpus)
    gpus = tuple(gpu for gpu in host.gpus if gpu.gfx.startswith("gfx") == (config.hardware.vendor == Vendor.amd))  # as its mask counts
    seen = dataclasses.replace(host, gpus=gpus, environ={**host.environ, **config.user_env})
    found = table.before_run(gather(seen, config.hardware, config.run_root, used), contained=config.runtime.on_node == "docker")
    wrong = {status: [(check.name, f) for check, f in found.items() if f.status == status] for status in (Status.fail, Status.warn)}
    for name, finding in wrong[Status.warn]:
        print(f"warning: {name}: {finding.read}. Expected: {finding.threshold}. {finding.cure}.", file=sys.stderr)
    if wrong[Status.fail]:
        lines = [f"{name}: {f.read}. Expected: {f.threshold} [{f.source}]. {f.cure}." for name, f in wrong[Status.fail]]
        raise HostError("\n".join([*lines, "python launch/doctor.py shows everything that this machine was checked for."]))
