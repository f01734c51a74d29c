"""The commands with a Python that has not been given the environment.

One line, and what to type.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def bare(*arguments, cwd=ROOT):
    """Run a Python without site-packages."""
    return subprocess.run(
        [sys.executable, "-S", *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )


@pytest.mark.parametrize("program", [
    "launch/run.py",
    "launch/doctor.py",
    "launch/report.py",
    "launch/reproduce.py",
    "containers/build.py",
])  # fmt: skip
def test_every_door_says_it_in_one_line(program):
    done = bare(program, "--help")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(
        f"{sys.executable} has no docker, hydra, omegaconf, rich: it is not the Python of this "
        "repository. Use: "
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("made", [True, False])
def test_the_remedy_is_what_is_lacking(made, tmp_path):
    (tmp_path / "launch/core").mkdir(parents=True)
    shutil.copy(ROOT / "launch/core/installed.py", tmp_path / "launch/core")
    (tmp_path / ".venv").mkdir()
    if made:
        (tmp_path / ".venv/setup.json").touch()
    said = bare("-c", "import launch.core.installed", cwd=tmp_path).stderr
    activate = (
        f"source {tmp_path}/.venv/bin/activate"
        if made
        else "make setup, then source .venv/bin/activate"
    )
    assert said.endswith(f"Use: {activate}.\n")


def test_ranks_import_core_with_nothing_installed():
    """Images have no docker and no hydra; a base may bring its own Python."""
    modules = sorted(
        f"launch.core.{file.stem}"
        for file in (ROOT / "launch/core").glob("*.py")
        if file.stem not in ("__init__", "installed")
    )
    done = bare("-c", f"import {', '.join(modules)}")
    assert (done.returncode, done.stderr) == (0, "")
