"""Test the progress line and the log above it."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys

import pytest

from launch.execution.progress_line import Progress, describe
from tests.conftest import ROOT
from tests.helpers.supervised import DONE, plan_of

ROW = {
    "step": 40, "num_steps": 400, "loss": 0.91234, "tokens_per_second": 12345.6, "time_s": 80.0,
    "memory_peak_gb": 41.26,
}  # fmt: skip


@pytest.mark.parametrize(("row", "line"), [
    (ROW, "step 40/400, loss 0.912, 12,346 tokens/s, 12 min 00 s left, peak 41.3 GB"),
    ({"step": 1, "num_steps": 2, "time_s": 59.7, "reward": 0.5},
     "step 1/2, reward 0.5, 1 min 00 s left"),
    ({"step": 7, "num_steps": None, "tokens_per_second": None}, "step 7"),
])  # fmt: skip
def test_description_of_a_row(row, line):
    assert describe(row) == line


def test_the_last_complete_row_is_shown(tmp_path):
    plan = plan_of(tmp_path, {"trainers": DONE})
    metrics = tmp_path / "metrics.jsonl"
    progress = Progress(plan)

    def line() -> str:
        progress.update()
        return progress.line.partition(": ")[2]

    assert line() == "starting (imports and model)"
    metrics.write_text(json.dumps({"step": 1, "num_steps": 9}) + "\n")
    assert line() == "step 1/9"
    with metrics.open("a") as file:
        file.write('{"step": 2, "num_st')
        file.flush()
        assert line() == "step 1/9"
        file.write('eps": 9}\nnot json\n')
    assert line() == "step 1/9"
    with metrics.open("ab") as file:
        file.write(b'[1]\n\xff\n{"step": 3, "num_steps": 9}\n')
    assert line() == "step 3/9"
    metrics.write_text('{"step": 1, "num_steps": 9}\n')  # a resumed run repeats steps
    assert line() == "step 1/9"
    metrics.unlink()
    assert line() == "step 1/9"


TRAINS = """
for step in range(1, 4):
    with (run / "metrics.jsonl").open("a") as file:
        row = {"step": step, "num_steps": 3, "loss": 1 / step, "time_s": step}
        row["memory_peak_gb"] = 2.5
        file.write(json.dumps(row) + "\\n")
    print("did", step, flush=True)
    time.sleep(0.3)
"""


def start(run_dir, script, **streams) -> subprocess.Popen:
    argv = [sys.executable, str(ROOT / "tests/helpers/supervised.py"), str(run_dir)]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    return subprocess.Popen([*argv, f"trainers={script}"], env=env, **streams)


def test_on_a_terminal_the_line_stays_below_the_log(tmp_path):
    ours, theirs = os.openpty()
    child = start(tmp_path, TRAINS + DONE, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        output = b""
        while select.select([ours], [], [], 60)[0] and (chunk := read(ours)):
            output += chunk
        assert child.wait(60) == 0, output.decode()
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    for step, loss in ((1, "1"), (2, "0.5"), (3, "0.333")):
        assert f"step {step}/3, loss {loss}," in shown
        assert f"trainers | did {step}" in shown
    assert b"\x1b[2K" in output, "the line is written over"
    assert len(re.findall(r"step \d/3", shown)) > 3, "it moves between the steps too"


def read(terminal: int) -> bytes:
    """Return b"" after the other side has closed, which Linux reports as EIO."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_a_terminal_that_closes_does_not_change_the_exit_code(tmp_path):
    fails = "print('one', flush=True); time.sleep(0.3); print('two', flush=True); sys.exit(1)"
    ours, theirs = os.openpty()
    child = start(tmp_path, fails, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    try:
        assert child.wait(60) == 4
    finally:
        child.kill()
        child.wait()
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "failed"
