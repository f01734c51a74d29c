"""Test a pipeline of real runs that is changed, killed and resumed.

It takes many launches, so it is here and not in `make test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.core import json_files
from tests.conftest import command
from tests.integration.conftest import started, wait_until

pytestmark = pytest.mark.integration


SMALL = """
hardware=cpu model=tiny smoke=true data.num_train=16 data.num_heldout=4 name=p
""".split()
PHASES = (
    "phases=[{{name: sft, overrides: ['method.args.max_steps=2']}},"
    " {{name: more, model_from: sft, overrides: ['method.args.max_steps=2', "
    "'method.args.learning_rate={}']}}]"
)


def runs(root: Path) -> list[Path]:
    """Return the run directories, the oldest first."""
    return sorted(
        (path.parent for path in root.glob("runs/p/*/record.json")),
        key=lambda folder: folder.stat().st_ctime_ns,
    )


def killed_in(phase: str, root: Path, *arguments: str) -> None:
    """Kill the launcher once `phase` has begun; its processes end by themselves."""
    known = {*root.glob(f"runs/p/*/{phase}/record.json")}
    launcher = started(*arguments, cwd=root)
    wait_until(lambda: {*root.glob(f"runs/p/*/{phase}/record.json")} - known, launcher)
    launcher.kill()
    launcher.wait()


def test_a_changed_phase_runs_on_the_finished_one_and_resumes_after_a_kill(tmp_path):
    """The files of the first pipeline stay as they are."""
    assert command(*SMALL, PHASES.format(1e-3), cwd=tmp_path).returncode == 0
    [first] = runs(tmp_path)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    changed = [*SMALL, PHASES.format(2e-3)]
    killed_in("2_more", tmp_path, *changed)
    done = command(*changed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done already") == 1
    [_, second] = runs(tmp_path)
    assert (second / "1_sft").readlink() == Path("..") / first.name / "1_sft"
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    weights = [
        json_files.read_json(run / "2_more/result.json")["weights_sha256"]
        for run in (first, second)
    ]
    assert weights[0] != weights[1]
