"""A pipeline of real runs, reproduced, gone on with and changed: many launches, so it stands here and not in `make test`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.files import rundir, sealed
from tests.conftest import ROOT, command

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> tuple[Path, list[Path]]:
    """The run directories of the quickstart in small, which is done, and of its phases."""
    root = tmp_path_factory.mktemp("quickstart")
    done = command("experiment=quickstart", "smoke=true", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    parent = next(p.parent for p in root.glob("runs/quickstart*/*/record.json"))
    kept = rundir.read_json(parent / "record.json")
    assert kept["status"] == "done"
    return parent, [parent / folder for folder in kept["phases"].values()]


def test_a_pipeline_goes_on_at_the_phase_that_stopped(pipeline):
    """The last phase is stopped; those before it are not run again."""
    parent, phases = pipeline
    for folder in (parent, phases[-1]):
        stopped = json.loads((folder / "record.json").read_text())
        rundir.write_json(folder / "record.json", sealed.seal({**stopped, "status": "interrupted", "exit_code": 75}))
    before = [(folder / "record.json").stat().st_mtime_ns for folder in phases]
    again = command("experiment=quickstart", "smoke=true", cwd=parent.parents[2])
    assert again.returncode == 0, again.stdout + again.stderr
    after = [(folder / "record.json").stat().st_mtime_ns for folder in phases]
    assert [folder for folder, old, new in zip(phases, before, after, strict=True) if old != new] == [phases[-1]]
    assert again.stdout.count("done already") == len(phases) - 1


SMALL = ["hardware=cpu", "model=tiny", "smoke=true", "data.num_train=16", "data.num_heldout=4", "name=p"]
PHASES = (
    "phases=[{{name: sft, overrides: ['method.args.max_steps=2']}},"
    " {{name: more, model_from: sft, overrides: ['method.args.max_steps=2', 'method.args.learning_rate={}']}}]"
)


def runs(root: Path) -> list[Path]:
    """Run directories, the oldest first."""
    return sorted((path.parent for path in root.glob("runs/p/*/record.json")), key=lambda folder: folder.stat().st_ctime_ns)


def result(folder: Path) -> dict:
    found = rundir.read_json(folder / "result.json")
    return {key: found.get(key) for key in ("status", "weights_sha256", "data_sha256", "accuracy")}


def killed_in(phase: str, root: Path, *arguments: str) -> None:
    """The launcher is killed once `phase` has begun; its processes end by themselves."""
    known = {path.parent for path in root.glob(f"runs/p/*/{phase}/record.json")}
    with subprocess.Popen([sys.executable, str(ROOT / "launch/run.py"), *arguments], cwd=root, stdout=subprocess.DEVNULL) as launcher:
        while not {path.parent for path in root.glob(f"runs/p/*/{phase}/record.json")} - known:
            assert launcher.poll() is None, "it ended before"
            time.sleep(0.02)
        launcher.kill()


def test_a_changed_phase_is_run_on_what_was_kept_and_ends_as_if_all_had_run(tmp_path):
    """Killed in the changed phase too. The weights are those of the same pipeline with nothing kept, and it is reproduced."""
    assert command(*SMALL, PHASES.format(1e-3), cwd=tmp_path).returncode == 0
    [first] = runs(tmp_path)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    changed = [*SMALL, PHASES.format(2e-3)]
    killed_in("2_more", tmp_path, *changed)
    done = command(*changed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [_, second] = runs(tmp_path)
    assert (second / "1_sft").readlink() == Path("..") / first.name / "1_sft"
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert command(*changed, "resume=never", cwd=tmp_path).returncode == 0
    whole = runs(tmp_path)[-1]
    assert not (whole / "1_sft").is_symlink()
    for name in ("1_sft", "2_more"):
        assert result(second / name) == result(whole / name), name
    assert result(first / "2_more")["weights_sha256"] != result(second / "2_more")["weights_sha256"]
    argv = [sys.executable, str(ROOT / "launch/reproduce.py"), str(second)]
    reproduced = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert reproduced.returncode == 0, reproduced.stdout + reproduced.stderr
    assert reproduced.stdout.count("to the last digit") == 2
    assert [path.parent for path in second.glob("1_sft-again-*")] == [second]
