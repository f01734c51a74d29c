"""Test how programs are watched: reasons of failures, time limits, and leftover processes."""

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
ENDED = r" \(exit code 7; .*/log\)"


@pytest.mark.parametrize(("log", "report", "code", "reason"), [
    (ENGINE, None, 7, "OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB" + ENDED),
    (USAGE, None, 7, "error: unrecognized arguments: --max-num-sequences 4" + ENDED),
    ("", None, -9, r"no output \(killed by SIGKILL; "),
    ("", "torch.OutOfMemoryError: CUDA", 1, "out of memory$"),
    ("", "ValueError: no\nsecond line", 1, "ValueError: no$"),
])  # fmt: skip
def test_reason_of_a_failure(tmp_path, log, report, code, reason):
    start = f"import os, sys; sys.stdout.write({log!r}); sys.stdout.flush(); "
    end = f"sys.exit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
    if report:
        (tmp_path / "result.json").write_text(json.dumps({"error": report}))
    process = processes.MarkedProgram([sys.executable, "-c", start + end], {}, tmp_path / "log")
    with pytest.raises(UserError, match=f"^{reason}"):
        processes.wait([process], process.ended, tmp_path / "heartbeat")


# Starts a child in a new session, as torchrun and vLLM do.
CHILD = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
"""
SLEEP = "time.sleep(600)"


@pytest.mark.parametrize(("end", "limits", "stopped", "error", "message"), [
    ("", {}, False, None, ""),
    ("sys.exit(3)", {}, False, UserError, "exit code 3"),
    (SLEEP, {"timeout_s": 0.5}, False, UserError, r"method\.args\.timeout_s=0\.5 s"),
    (SLEEP, {"patience_s": 0.5}, False, UserError, "hung"),
    (SLEEP, {}, True, Interrupted, "interrupted"),
])  # fmt: skip
def test_all_processes_of_a_program_end(
    tmp_path, monkeypatch, end, limits, stopped, error, message
):
    log, beat = tmp_path / "log", tmp_path / "heartbeat"
    # The mark of an outer program must not hide the mark of this one.
    process = processes.MarkedProgram(
        [sys.executable, "-c", CHILD + end], {**os.environ, processes.MARK: "\nouter"}, log
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
