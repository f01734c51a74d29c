"""A training whose loss is no number any more: it ends there, on every rank, and says so."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    asked = ["topology=ddp", "topology.num_gpus=2", "method.args.learning_rate=1e30", "method.args.max_steps=20", f"run_root={tmp_path}"]
    command = [sys.executable, "launch/run.py", "hardware=cpu", "smoke=true", "tracking=none", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 4, done.stdout + done.stderr
    (run,) = tmp_path.glob("*/*/result.json")
    result, rows = json.loads(run.read_text()), [json.loads(line) for line in (run.parent / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] is None, "the step is on record"
    assert all(row["loss"] is not None for row in rows[:-1])
    assert len(rows) < 20
    assert result["status"] == "failed"
    assert f"the loss of step {rows[-1]['step']} is nan: the training diverged. Lower method.args.learning_rate (1e+30)" in done.stderr
