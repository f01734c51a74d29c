"""Test launch/doctor.py active=true on a CPU.

The real program runs, and its processes go wrong in every way they can.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time

import pytest
import torch

from launch import doctor
from launch.checks import check_table, measuring
from launch.checks.finding import Status
from launch.execution import orphans
from tests.conftest import ROOT
from tests.helpers import sysroots


def checks(out: str) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_on_a_cpu(tmp_path):
    """Called from another folder, two gloo processes all-reduce the right sum."""
    command = [
        sys.executable,
        str(ROOT / "launch/doctor.py"),
        *"hardware=cpu active=true format=json".split(),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    findings = checks(done.stdout)
    assert findings["active_tests"]["status"] == "pass", (findings["active_tests"], done.stderr)
    assert findings["active_tests"]["read"].startswith("2 processes on the CPU in ")
    assert done.stderr == "active tests: 2 processes on the CPU, at most 180 s\n"
    assert (findings["gemm"]["status"], findings["all_reduce"]["status"]) == ("pass", "pass")
    assert findings["all_reduce"]["read"] == "correct on 2 ranks"
    rates = [findings[name]["status"] for name in ("gemm_rate", "copy_rate", "all_reduce_rate")]
    assert rates == ["unknown"] * 3
    assert not {"gemm_fp32_output", "xcd_clocks"} & set(findings), "of GPUs only"
    measured = json.loads(done.stdout)["measured"]
    assert [row["rank"] for row in measured] == [0, 1]
    for row in measured:
        assert (row["phase"], row["all_reduce_wrong"]) == ("done", 0)
        assert min(row["gemm_tflops"], row["copy_gb_s"], row["all_reduce_gb_s"]) > 0
        assert row["gemm_error"] < 1e-4  # at most 256 roundings of 6e-8 in fp32
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("wrong", "timeout_s", "message"), [
    ("dies", 60, "process 1 exited first, killed by signal 9 (SIGKILL); process 0 was in "),
    ("hangs", 1, "killed after 1 s: process 0"),
    ("is cut off", 60, "process 0: rank0.json is malformed: Unterminated string"),
])  # fmt: skip
def test_a_process_that_fails_or_hangs_is_reported(wrong, timeout_s, message, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "PROGRAM", "tests.helpers.active_ranks")
    monkeypatch.setattr(measuring, "TIMEOUT_S", timeout_s)
    monkeypatch.setenv("TORCH_WRONG", wrong)
    began = time.monotonic()
    code = doctor.main(["hardware=cpu", "active=true", "format=json"])
    out, err = capsys.readouterr()
    findings = checks(out)
    assert code == 3
    assert findings["active_tests"]["status"] == "fail"
    assert findings["active_tests"]["read"].startswith(message)
    assert "run it yourself" in findings["active_tests"]["cure"]
    assert f"PYTHONPATH={ROOT}" in findings["active_tests"]["cure"]
    if wrong == "dies":
        assert "process 1 was in GEMM" in findings["active_tests"]["read"]
    assert not {"torch_gpus", "gemm", "all_reduce"} & set(findings), "one failure, said once"
    assert "Traceback" not in err
    assert orphans.marked({orphans.LAUNCHER: orphans.launcher()}) == [], "processes are left"
    assert time.monotonic() - began < timeout_s + 15


def test_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # so that Python cannot import it
    doctor.main(["hardware=cpu", "active=true", "format=json"])
    findings = checks(capsys.readouterr().out)["active_tests"]
    assert (findings["status"], findings["read"]) == ("unknown", f"{sys.executable} has no torch")
    assert findings["cure"].startswith("make setup")


def test_gpus_in_use_are_left_alone(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    machine.write(f"{machine.device(5)}/mem_info_vram_used", 150 << 30)
    outcome = measuring.run(machine.facts(), force=False)
    assert outcome.not_run == (
        "the GPUs are in use: 0000:05:00.0 161.1 GB (78%)",
        "wait until they are free, or test anyway: python launch/doctor.py active=force",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch sees a GPU")
def test_a_torch_that_sees_none_of_the_gpus(tmp_path):
    """The program is started as for a GPU."""
    facts = sysroots.mi300x(tmp_path, num_gpus=1).facts()
    facts = dataclasses.replace(facts, host=dataclasses.replace(facts.host, python=sys.executable))
    outcome = measuring.run(facts, force=False)
    assert outcome.failed is None
    assert outcome.measured[0].not_measured == f"torch {torch.__version__} sees 0 GPU(s)"
    wrong = {
        check.name: finding
        for check, finding in check_table.run(dataclasses.replace(facts, active=outcome)).items()
    }
    assert wrong["torch_gpus"].status == Status.fail
    assert wrong["torch_gpus"].read == f"torch {torch.__version__} sees 0"
    assert wrong["active_tests"].status == Status.unknown
    assert "gemm" not in wrong
