"""Provide plans for tests of runtime=slurm, and stubs of Slurm's commands."""

from __future__ import annotations

import shlex
from pathlib import Path

from launch.plan.planning import make_plan, prepare
from launch.schema.plan import Plan
from tests.conftest import composed, host_with

JOB = ["runtime=slurm", "hardware=cpu", "tracking=none"]
TWO = """
hardware=mi300x model=qwen3_4b runtime=slurm runtime.slurm.nodes=2 runtime.slurm.interface=ib0
""".split()


def planned(
    *overrides: str, run_dir: Path = Path("/shared/my runs/100%/1"), **environ: str
) -> Plan:
    config, warnings = prepare(composed(*overrides))
    return make_plan(config, host_with(8, **environ), run_dir, warnings)


class Tools:
    """A directory of stub programs, each a line of shell, which log their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, body: str) -> None:
        file = self.folder / name
        file.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(self.folder / "calls"))}\n{body}\n'
        )
        file.chmod(0o755)

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []
