"""What tests of runtime=slurm share: a folder of stand-ins for Slurm's commands, first on the PATH."""

from __future__ import annotations

import os

import pytest

from tests.unit.slurm_examples import Tools


@pytest.fixture
def tools(tmp_path_factory, monkeypatch):
    found = Tools(tmp_path_factory.mktemp("tools") / "bin")
    found.add("sbatch", "echo 12")
    found.add("squeue", "echo PENDING")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    return found
