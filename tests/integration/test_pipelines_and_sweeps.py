"""Pipelines and sweeps: many launches each, so they stand here and not in `make test`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launch import record, rundir
from tests.conftest import ROOT, command

pytestmark = pytest.mark.integration
SMALL = ["hardware=cpu", "data.num_train=64", "data.num_heldout=16", "method.args.per_device_train_batch_size=4", "method.args.max_steps=2"]


def test_the_quickstart_in_small(tmp_path):
    done = command("experiment=quickstart", "smoke=true", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    parent = next(p.parent for p in tmp_path.glob("runs/quickstart*/*/record.json"))
    assert (parent / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert done.stdout.count("held-out accuracy") >= 2
    kept = json.loads((parent / "record.json").read_text())
    assert kept["status"] == "done"
    assert all((parent / folder / "result.json").is_file() for folder in kept["phases"].values())
    again = command("experiment=quickstart", "smoke=true", f"resume={parent}", cwd=tmp_path)
    assert "that run is done" in again.stderr
    reproduced = subprocess.run(
        [sys.executable, str(ROOT / "launch/reproduce.py"), str(parent)], cwd=tmp_path, capture_output=True, text=True
    )
    assert reproduced.returncode == 0, reproduced.stdout + reproduced.stderr
    assert reproduced.stdout.count("to the last digit") == len(kept["phases"])


def test_a_pipeline_goes_on_at_the_phase_that_stopped(tmp_path):
    """The second phase is stopped; the first is not run again."""
    done = command("experiment=quickstart", "smoke=true", cwd=tmp_path)
    assert done.returncode == 0
    parent = next(p.parent for p in tmp_path.glob("runs/quickstart*/*/record.json"))
    kept = json.loads((parent / "record.json").read_text())
    last = list(kept["phases"].values())[-1]
    for folder in (parent, parent / last):
        stopped = json.loads((folder / "record.json").read_text())
        rundir.write_json(folder / "record.json", record.seal({**stopped, "status": "interrupted", "exit_code": 75}))
    before = {folder: (parent / folder / "record.json").stat().st_mtime_ns for folder in kept["phases"].values()}
    again = command("experiment=quickstart", "smoke=true", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    after = {folder: (parent / folder / "record.json").stat().st_mtime_ns for folder in kept["phases"].values()}
    assert [folder for folder in before if before[folder] != after[folder]] == [last]
    assert again.stdout.count("done already") == len(before) - 1


def test_a_sweep_trains_every_job(tmp_path):
    done = command("-m", *SMALL, "seed=0,1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    seeds = sorted(json.loads(p.read_text())["composition"]["seed"] for p in tmp_path.glob("runs/*/*/record.json"))
    assert seeds == [0, 1]
