"""Test rocprof=compute with a program in place of rocprof-compute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROFILER = """\
#!/bin/sh
mode=$1; shift
if [ $mode = analyze ]; then echo "tables of $2"; exit %d; fi
folder=$4; shift 5
mkdir -p $folder/MI300X && touch $folder/MI300X/sysinfo.csv
exec "$@"
"""


@pytest.mark.parametrize(("rank_code", "analysis_code", "analyzed"), [
    (0, 0, True),
    (0, 3, True),  # the run has succeeded
    (4, 0, False),
])  # fmt: skip
def test_the_analysis_follows_a_successful_profile(tmp_path, rank_code, analysis_code, analyzed):
    program, folder = tmp_path / "rocprof-compute", tmp_path / "profile"
    program.write_text(PROFILER % analysis_code)
    program.chmod(0o755)
    argv = [sys.executable, "-m", "recipes.measure.compute_profile", str(folder), "--"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [*argv, "sh", "-c", f"exit {rank_code}"],
        env={"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == rank_code
    analysis = folder / "analysis.txt"
    assert analysis.exists() == analyzed
    if analyzed:
        assert analysis.read_text() == f"tables of {folder}/rocprof-compute/MI300X\n"
        assert ("failed" in done.stdout) == bool(analysis_code)
