"""Test programs that are watched: why they ended, how long they may take, what they leave."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launch.core.errors import UserError
from recipes.bench import processes
from recipes.rank.program import Interrupted

ENGINE = """\
(EngineCore pid=7) torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
USAGE = "usage: vllm\nvllm: error: unrecognized arguments: --max-num-sequences 4\n"
HOW = r" \(exit code 7; .*/log\)"


@pytest.mark.parametrize(("log", "report", "code", "reason"), [
    (ENGINE, None, 7, "OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB" + HOW),
    (USAGE, None, 7, "error: unrecognized arguments: --max-num-sequences 4" + HOW),
    ("", None, -9, r"no output \(killed by SIGKILL; "),
    ("", "torch.OutOfMemoryError: CUDA", 1, "out of memory$"),
    ("", "ValueError: no\nsecond line", 1, "ValueError: no$"),
])  # fmt: skip
def test_why_a_program_ended(tmp_path, log, report, code, reason):
    start = f"import os, sys; sys.stdout.write({log!r}); sys.stdout.flush(); "
    end = f"sys.exit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
    if report:
        (tmp_path / "result.json").write_text(json.dumps({"error": report}))
    process = processes.Process([sys.executable, "-c", start + end], {}, tmp_path / "log")
    with pytest.raises(UserError, match=f"^{reason}"):
        processes.wait([process], process.ended, tmp_path / "heartbeat")


# A child in a session of its own, as torchrun and vLLM start theirs.
CHILD = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
"""
SLEEP = "time.sleep(600)"


@pytest.mark.parametrize(("then", "limits", "stopped", "error", "message"), [
    ("", {}, False, None, ""),
    ("sys.exit(3)", {}, False, UserError, "exit code 3"),
    (SLEEP, {"timeout_s": 0.5}, False, UserError, r"still running after 0\.5 s"),
    (SLEEP, {"patience_s": 0.5}, False, UserError, "hung"),
    (SLEEP, {}, True, Interrupted, "interrupted"),
])  # fmt: skip
def test_a_program_leaves_no_process_however_it_ends(
    tmp_path, monkeypatch, then, limits, stopped, error, message
):
    log, beat = tmp_path / "log", tmp_path / "heartbeat"
    # Marked by the program that started this one, too, which must find it as well.
    process = processes.Process(
        [sys.executable, "-c", CHILD + then], {**os.environ, processes.MARK: "\nouter"}, log
    )

    def done() -> bool:
        started = log.read_text().endswith("\n")
        monkeypatch.setattr(processes, "stop_requested", lambda: stopped and started)
        return process.ended() and started

    if error:
        with pytest.raises(error, match=message):
            processes.wait([process], done, beat, **{"timeout_s": 60, **limits})
    else:
        processes.wait([process], done, beat)
        process.end()
    assert beat.exists()
    child = Path(f"/proc/{int(log.read_text())}/stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"
