"""The line that moves: what it says, and that it moves on a terminal."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys

from launch.execution.progress import Progress, describe
from tests.conftest import ROOT
from tests.helpers.supervised import DONE, plan_of

ROW = {
    "step": 40,
    "num_steps": 400,
    "loss": 0.91234,
    "tokens_per_second": 12345.6,
    "time_s": 80.0,
    "memory_peak_gb": 41.26,
}


def test_what_a_line_says():
    assert (
        describe(ROW) == "step 40/400, loss 0.912, 12,346 tokens/s, 12 min 00 s left, peak 41.3 GB"
    )
    assert (
        describe({**ROW, "loss": None, "reward": 0.5})
        == "step 40/400, reward 0.5, 12,346 tokens/s, 12 min 00 s left, peak 41.3 GB"
    )
    assert describe({"step": 1, "num_steps": 2, "time_s": 59.7}) == "step 1/2, 1 min 00 s left"
    assert (
        describe({"step": 7, "num_steps": None, "tokens_per_second": None, "memory_peak_gb": None})
        == "step 7"
    )


def test_rows_as_they_come(tmp_path):
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
        assert line() == "step 1/9", "half a row says nothing"
        file.write('eps": 9}\nnot json\n')
    assert line() == "step 1/9"
    with metrics.open("ab") as file:
        file.write(b'3\n[1]\n\xff\n{"step": 3, "num_steps": 9}\n')
    assert line() == "step 3/9"
    metrics.write_text('{"step": 1, "num_steps": 9}\n')  # resumed: what is done again was cut off
    assert line() == "step 1/9"
    metrics.unlink()
    assert line() == "step 1/9"


def test_markup_in_a_log_is_text(tmp_path, capsys):
    with Progress(plan_of(tmp_path, {"trainers": DONE})) as progress:
        progress.log("trainers", ["[bold]no[/bold] [/red]", "[link=x] [1, 2]"])
        progress.log("trainers", [])
        progress.note("[red]note[/red]")
        progress.say("[blink]says")
    told = capsys.readouterr().err
    assert "trainers | [bold]no[/bold] [/red]\ntrainers | [link=x] [1, 2]\n" in told
    assert "[red]note[/red]" in told
    assert ": [blink]says" in told


TRAINS = """
for step in range(1, 4):
    with (run / "metrics.jsonl").open("a") as file:
        row = {"step": step, "num_steps": 3, "loss": 1 / step, "time_s": step}
        row["memory_peak_gb"] = 2.5
        file.write(json.dumps(row) + "\\n")
    print("did", step, flush=True)
    time.sleep(0.5)
"""


def test_on_a_terminal_the_line_moves_below_the_log(tmp_path):
    ours, theirs = os.openpty()
    argv = [
        sys.executable,
        str(ROOT / "tests/helpers/supervised.py"),
        str(tmp_path),
        f"trainers={TRAINS}{DONE}",
    ]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    child = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    try:
        told = b""
        while select.select([ours], [], [], 60)[0] and (chunk := read(ours)):
            told += chunk
        assert child.wait(60) == 0, told.decode()
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told.decode())
    for step, loss in ((1, "1"), (2, "0.5"), (3, "0.333")):
        assert f"step {step}/3, loss {loss}," in shown
        assert f"trainers | did {step}" in shown
    assert b"\x1b[2K" in told, "the line is written over"
    assert len(re.findall(r"step \d/3", shown)) > 3, "it moves between the steps too"


def read(terminal: int) -> bytes:
    """b"" when nobody holds the other side any more, which Linux says by EIO."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_nobody_reads(tmp_path):
    """`launch/run.py ... 2>&1 | head`: the run goes on, and its exit code is its own."""
    argv = [
        sys.executable,
        str(ROOT / "tests/helpers/supervised.py"),
        str(tmp_path),
        f"trainers={TRAINS}sys.exit(1)",
    ]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    child.stdout.close()
    try:
        assert child.wait(60) == 4
    finally:
        child.kill()
        child.wait()
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "failed"
