"""Choose settings that the user left open, from the record of a resumed run or by the planner."""

from __future__ import annotations

from pathlib import Path

from launch.config.choose import OF_A_BATCH, apply, choose, recorded
from launch.config.identity import identity, identity_of
from launch.core.json_files import read_json
from launch.machine.detect import Host
from launch.plan.rundir import untrusted
from launch.schema import Config


def with_choices(config: Config, host: Host, run_dir: Path) -> Config:
    """Return a prepared `config` with every choice made. A resumed run uses its record's.

    On other ranks than before (launch/plan/resuming.py) the batch is divided again, into the same
    sequences per step.
    """
    before = (read_json(run_dir / "record.json") or {}).get("composition")
    if before is None or untrusted(run_dir):  # rundir rejects such a record
        return choose(config, host)
    choices = recorded(before)
    if identity(before) == identity_of(config):
        return apply(config, choices)
    lasting = [choice for choice in choices if choice.key not in OF_A_BATCH]
    return choose(apply(config, lasting), host)
