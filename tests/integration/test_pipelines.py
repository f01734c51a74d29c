"""A pipeline of real runs, reproduced and gone on with: many launches, so it stands here and not in `make test`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import record, rundir
from tests.conftest import ROOT, command

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> tuple[Path, list[Path]]:
    """The run directories of the quickstart in small, which is done, and of its phases."""
    root = tmp_path_factory.mktemp("quickstart")
    done = command("experiment=quickstart", "smoke=true", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    parent = next(p.parent for p in root.glob("runs/quickstart*/*/record.json"))
    kept = rundir.read_json(parent / "record.json")
    assert kept["status"] == "done"
    return parent, [parent / folder for folder in kept["phases"].values()]


def test_a_pipeline_is_reproduced_phase_by_phase(pipeline):
    parent, phases = pipeline
    argv = [sys.executable, str(ROOT / "launch/reproduce.py"), str(parent)]
    reproduced = subprocess.run(argv, cwd=parent.parents[2], capture_output=True, text=True)
    assert reproduced.returncode == 0, reproduced.stdout + reproduced.stderr
    assert reproduced.stdout.count("to the last digit") == len(phases)


def test_a_pipeline_goes_on_at_the_phase_that_stopped(pipeline):
    """The last phase is stopped; those before it are not run again."""
    parent, phases = pipeline
    for folder in (parent, phases[-1]):
        stopped = json.loads((folder / "record.json").read_text())
        rundir.write_json(folder / "record.json", record.seal({**stopped, "status": "interrupted", "exit_code": 75}))
    before = [(folder / "record.json").stat().st_mtime_ns for folder in phases]
    again = command("experiment=quickstart", "smoke=true", cwd=parent.parents[2])
    assert again.returncode == 0, again.stdout + again.stderr
    after = [(folder / "record.json").stat().st_mtime_ns for folder in phases]
    assert [folder for folder, old, new in zip(phases, before, after, strict=True) if old != new] == [phases[-1]]
    assert again.stdout.count("done already") == len(phases) - 1
