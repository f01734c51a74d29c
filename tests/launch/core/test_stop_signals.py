"""Send stop signals to programs that still import their modules."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.core.stop_signals import STOP_SIGNALS
from tests.conftest import ROOT


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(("program", "number"), [
    *(("launch/run.py", number) for number in STOP_SIGNALS),
    ("launch/reproduce.py", signal.SIGTERM),
    ("launch/execution/slurm_job.py", signal.SIGTERM),
])  # fmt: skip
def test_a_signal_during_imports_exits_with_75(tmp_path, program, number):
    child = subprocess.Popen(
        [sys.executable, str(ROOT / program), f"run_root={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    status, bit = Path(f"/proc/{child.pid}/status"), 1 << (signal.SIGUSR2 - 1)
    while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & bit:
        assert child.poll() is None, child.communicate()
    child.send_signal(number)
    child.send_signal(number)  # ignored
    out, error = child.communicate()
    assert (child.returncode, out, error.count("\n"), [*tmp_path.iterdir()]) == (75, "", 1, [])


OWNER = "type('Owner', (), {'stop': type('Name', (), {'__set_name__': stop})()})"


@pytest.mark.parametrize("body", [
    f"console.run_program(lambda _: {OWNER})",
    OWNER,
    "weakref.finalize(type('Owner', (), {})(), stop)",
])  # fmt: skip
def test_a_signal_is_not_lost_where_python_replaces_exceptions(body):
    code = (
        "import os, signal, weakref\n"
        "from launch.core import console, stop_signals\n"
        "stop_signals.install()\n"
        f"def stop(*_): os.kill(os.getpid(), {signal.SIGTERM:d})\n{body}\n"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (child.returncode, child.stderr.count("\n")) == (75, 1)
