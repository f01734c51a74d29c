"""Test a benchmark row in which one of two gloo ranks runs out of memory."""

from __future__ import annotations

import json
import subprocess
import sys

from omegaconf import OmegaConf

from tests.conftest import ROOT


def test_a_row_that_fails_on_one_rank_ends_the_run_and_a_resumed_one_skips_it(tmp_path):
    config = {"run_dir": str(tmp_path), "hardware": {"name": "h200"}, "profile": "none"}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    program = ["-m", "tests.e2e.one_rank_fails", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(
        [sys.executable, *program], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "[1, 0]\n", done.stdout + done.stderr
    failure = json.loads((tmp_path / "failures/rank1.json").read_text())
    assert failure["error"] == "only this rank failed: out of memory"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["shape"], row.get("sum"), row["error"]) for row in rows] == [
        ("first", 2.0, None),
        ("second", None, "out of memory"),
        ("third", 2.0, None),
    ]
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "done"
