"""The commands with a Python that has not been given the environment: one line, and what to type."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def bare(*arguments, cwd=ROOT):
    """A Python without site-packages."""
    return subprocess.run([sys.executable, "-S", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("program", ["launch/run.py", "launch/doctor.py", "launch/report.py", "launch/reproduce.py", "containers/build.py"])
def test_every_door_says_it_in_one_line(program):
    done = bare(program, "--help")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"{sys.executable} has no docker, hydra, omegaconf, rich: it is not the Python of this repository. Use: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("made", [True, False])
def test_the_remedy_is_what_is_lacking(made, tmp_path):
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/__init__.py", tmp_path / "launch")
    (tmp_path / ".venv").mkdir()
    if made:
        (tmp_path / ".venv/setup.json").touch()
    said = bare("-c", "import launch", cwd=tmp_path).stderr
    activate = f"source {tmp_path}/.venv/bin/activate" if made else "make setup, then source .venv/bin/activate"
    assert said.endswith(f"Use: {activate}.\n")
