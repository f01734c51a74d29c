"""Test sweeps on the CPU: a search that is killed and resumed, and parallel trials."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import ROOT, command
from tests.integration.conftest import started, wait_until

pytestmark = pytest.mark.integration
SMALL = """
hardware=cpu data.num_train=64 data.num_heldout=8 method.args.per_device_train_batch_size=4
tracking=none
""".split()
# A rule rejects the second value.
RATES = "+sweep.space={rate: {key: method.args.learning_rate, values: [1e-3, fast, 2e-3]}}"
SEARCH = ["-m", "sweep=sft_learning_rate", "~sweep.space.learning_rate", RATES, *SMALL]
STEPS = 20
SEARCH.append(f"method.args.max_steps={STEPS}")


def trials(root: Path) -> list[dict]:
    file = next(root.glob("runs/sweeps/*/sweep.json"), None)
    return json.loads(file.read_text())["trials"] if file else []


def run_of(root: Path, rate: float) -> Path | None:
    for file in root.glob("runs/sft-tiny-cpu/[0-9]*/record.json"):
        if json.loads(file.read_text())["composition"]["method"]["args"]["learning_rate"] == rate:
            return file.parent
    return None


def steps(root: Path, rate: float) -> int:
    run = run_of(root, rate)
    metrics = run / "metrics.jsonl" if run else None
    return len(metrics.read_text().splitlines()) if metrics and metrics.is_file() else 0


def test_killed_search_resumes_without_repeating_trials(tmp_path):
    process = started(*SEARCH, cwd=tmp_path)
    wait_until(lambda: steps(tmp_path, 2e-3) > 2, process)
    # Kill only the sweep. Then the kernel sends a signal to its trial, which saves.
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [trial["status"] for trial in trials(tmp_path)] == ["done", "failed", "running"]
    done_at = (run_of(tmp_path, 1e-3) / "record.json").stat().st_mtime_ns

    process = started(*SEARCH, cwd=tmp_path)
    code, output = process.wait(timeout=240), (tmp_path / "output").read_text()
    assert code == 2, output  # of the rejected trial
    assert "Resuming" in next(tmp_path.glob("runs/sweeps/*/logs/trial0002.log")).read_text()
    assert "learning_rate='fast'" in output
    assert "best loss" in output
    assert f"python {ROOT}/launch/run.py method=sft" in output
    assert (run_of(tmp_path, 1e-3) / "record.json").stat().st_mtime_ns == done_at
    # The rejected trial has no run.
    assert len(list(tmp_path.glob("runs/sft-tiny-cpu/[0-9]*/record.json"))) == 2
    assert steps(tmp_path, 2e-3) == STEPS
    assert [(trial["status"], trial["ran"]) for trial in trials(tmp_path)] == [
        ("done", False),
        ("failed", False),
        ("done", True),
    ]


def test_parallel_trials_continue_after_a_failure(tmp_path, monkeypatch):
    """Run two trials, one with a value that only ranks reject."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # then the sweep divides the cores
    grid = """
        -m method.args.max_steps=2 method.args.debug=nonsense,underflow_overflow sweep.parallel=2
        sweep.metric=loss
    """.split()
    done = command(*grid, *SMALL, cwd=tmp_path)
    assert done.returncode in (2, 4), done.stdout + done.stderr
    assert done.stdout.index("[1] starting") < done.stdout.index("[0] failed")
    first, second = trials(tmp_path)
    assert (first["status"], second["status"]) == ("failed", "done")
    assert "nonsense" in first["why"]
    log = next(tmp_path.glob("runs/sweeps/*/logs/trial0000.log")).read_text()
    assert "OMP_NUM_THREADS=1 " in log or (os.cpu_count() or 1) > 3
    assert "debug=underflow_overflow" in done.stdout.split("best loss", 1)[1]
