"""The settings that a run takes where nobody gave any: of its own record where it goes on, else what the planner chooses now."""

from __future__ import annotations

from pathlib import Path

from launch.files.rundir import read_json, untrusted
from launch.machine.detect import Host
from launch.plan import identity, identity_of
from launch.planner.choose import OF_A_BATCH, apply, choose, recorded
from launch.schema import Config


def with_choices(config: Config, host: Host, run_dir: Path) -> Config:
    """`config`, prepared, with every choice made. A run that began takes those of its record, whatever the planner would choose today.

    On other ranks than it began on (launch/files/resuming.py) the batch is divided anew, into the same sequences of a step.
    """
    before = (read_json(run_dir / "record.json") or {}).get("composition")
    if before is None or untrusted(run_dir):  # whoever would go on there refuses such a record
        return choose(config, host)
    choices = recorded(before)
    if identity(before) == identity_of(config):
        return apply(config, choices)
    return choose(apply(config, [choice for choice in choices if choice.key not in OF_A_BATCH]), host)
