"""Run the programs with a Python without our environment: one line with the command to use."""

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
def test_every_program_prints_one_line(program):
    done = bare(program, "--help")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"{sys.executable} has no docker, hydra, omegaconf, rich")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("is_set_up", [True, False])
def test_remedy_includes_setup_only_if_needed(is_set_up, tmp_path):
    (tmp_path / "launch/core").mkdir(parents=True)
    shutil.copy(ROOT / "launch/core/installed.py", tmp_path / "launch/core")
    (tmp_path / ".venv").mkdir()
    if is_set_up:
        (tmp_path / ".venv/setup.json").touch()
    message = bare("-c", "import launch.core.installed", cwd=tmp_path).stderr
    assert message.endswith(f"source {tmp_path}/.venv/bin/activate.\n")
    assert ("make setup" in message) is not is_set_up


def test_ranks_import_core_without_packages():
    """Images have neither docker nor hydra, and a base image may have its own Python."""
    modules = sorted(
        f"launch.core.{file.stem}"
        for file in (ROOT / "launch/core").glob("*.py")
        if file.stem not in ("__init__", "installed")
    )
    done = bare("-c", f"import {', '.join(modules)}")
    assert (done.returncode, done.stderr) == (0, "")
