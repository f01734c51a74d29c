"""Run experiment=hardware_report as a whole, small, on the CPU, and kill one of its stages."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.integration.conftest import PATIENCE_S, started, wait_until

pytestmark = pytest.mark.integration


def test_a_stage_that_is_killed_does_not_stop_the_others(tmp_path):
    process = started("experiment=hardware_report", "hardware=cpu", "smoke=true", cwd=tmp_path)

    def rank_of_sft() -> psutil.Process | None:
        for other in psutil.process_iter(["cmdline"]):
            words = other.info["cmdline"] or []
            if words and words[-1].startswith(str(tmp_path)) and "/3_sft/" in words[-1]:
                return other
        return None

    wait_until(rank_of_sft, process)
    if rank := rank_of_sft():
        rank.kill()
    assert process.wait(PATIENCE_S) == 4
    [run_dir] = (tmp_path / "runs/hardware_report").glob("[0-9]*")
    content = json.loads((run_dir / "hardware_report.json").read_text())
    assert {stage["stage"]: stage["status"] for stage in content["stages"]} == {
        **dict.fromkeys(("numerics", "gemm", "sft_compiled", "grpo"), "done"),
        "sft": "failed",
    }
    assert "SIGKILL" in content["stages"][2]["why"]
    figures = {s["stage"]: [f["measured"] for f in s["figures"]] for s in content["stages"]}
    assert all(None not in values for values in figures.values())
    assert figures["numerics"]
    assert figures["sft_compiled"]
    assert {check["status"] for check in content["doctor"]["checks"]} <= {"pass", "warn", "unknown"}
    assert "SIGKILL" in (run_dir / "report.html").read_text()
