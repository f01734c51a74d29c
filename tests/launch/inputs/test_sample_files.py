"""Test the files of data.path under data=samples, which ranks read and records contain."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch.core import json_files
from launch.core.errors import UserError
from launch.execution import record
from launch.inputs import sample_files
from launch.plan import rundir, sealed
from launch.plan.mounts import mounts as mounts_of
from launch.plan.planning import make_plan, rank_config
from launch.schema.plan import Plan
from recipes.data import data_load
from tests.conftest import composed, host_with

DPO = ["hardware=cpu", "model=tiny", "method=dpo", "data=samples"]


def scored(folder: Path, prompt: str, name: str = "scored.jsonl") -> str:
    """Write a file of one pair; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": prompt, "completion": text, "score": score}
        for text, score in (("right", 1.0), ("wrong", 0.0))
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def plan_of(tmp_path: Path, path: Path, *overrides: str) -> Plan:
    return make_plan(
        composed(*DPO, f"data.path={path}", *overrides), host_with(0), tmp_path / "run"
    )


def prompts(plan: Plan) -> list[str]:
    """Return the prompts that a rank of the plan trains on."""
    config = OmegaConf.create(rank_config(plan))
    OmegaConf.set_struct(config, True)
    return data_load.load(config.data, "dpo").rows["prompt"]


def test_ranks_read_the_listed_files_behind_links(tmp_path):
    """Read each file once, in the order of the phases, even if links form a cycle."""
    earlier, run_dir = tmp_path / "runs/1", tmp_path / "runs/2"
    files = [
        scored(earlier / "3_cycle1_sample", "first"),
        scored(run_dir / "6_cycle2_sample", "second"),
    ]
    scored(run_dir / "6_cycle2_sample", "another file", "selected.jsonl")
    (run_dir / "3_cycle1_sample").symlink_to("../1/3_cycle1_sample")
    (run_dir / "4_again").symlink_to("../1")
    (run_dir / "5_itself").symlink_to(".")
    (run_dir / "7_file.jsonl").symlink_to("6_cycle2_sample/scored.jsonl")
    assert sample_files.files(str(run_dir)) == files
    assert prompts(plan_of(tmp_path, run_dir)) == ["first", "second"]


def test_a_directory_without_scored_files_and_a_single_file(tmp_path):
    files = [
        scored(tmp_path / "s/a", "first", "b.jsonl"),
        scored(tmp_path / "s", "second", "c.jsonl"),
    ]
    assert sample_files.files(str(tmp_path / "s")) == files
    assert prompts(plan_of(tmp_path, tmp_path / "s")) == ["first", "second"]
    assert prompts(plan_of(tmp_path, Path(files[1]))) == ["second"]


def begin_run(plan: Plan) -> dict:
    entry = record.begin(plan, host_with(0), None, None)
    json_files.write_json(
        plan.run_dir / "record.json", sealed.seal({**entry, "status": "interrupted"})
    )
    return entry


CHANGES = {
    "rewritten": (lambda folder: scored(folder / "run1", "another"), "s/run1/scored.jsonl"),
    "added": (lambda folder: scored(folder / "run2", "another"), "s"),
    "lost": (lambda folder: (folder / "run1/scored.jsonl").unlink(), "s"),
    "behind a link": (
        lambda folder: scored(folder.parent / "kept", "another"),
        "kept/scored.jsonl",
    ),
    "of another link target": (
        lambda folder: ((folder / "link").unlink(), (folder / "link").symlink_to("../other")),
        "s",
    ),
    "of a broken link": (
        lambda folder: (folder.parent / "kept").rename(folder.parent / "gone"),
        "s",
    ),
}


@pytest.mark.parametrize(("change", "path"), CHANGES.values(), ids=CHANGES)
def test_runs_identify_samples_by_content(tmp_path, change, path):
    """Resume only with unchanged samples."""
    folder = tmp_path / "s"
    files = [scored(tmp_path / "kept", "of a kept phase"), scored(folder / "run1", "of run1")]
    scored(tmp_path / "other", "of another phase")
    (folder / "link").symlink_to("../kept")
    run_dir = tmp_path / "runs/n/1"
    overrides = [*DPO, f"data.path={folder}", f"run_root={tmp_path}/runs", "name=n"]
    plan = make_plan(composed(*overrides), host_with(0), run_dir)
    entry = begin_run(plan)
    assert entry["data"]["files"] == {file: json_files.sha256(Path(file)) for file in files}
    assert entry["data"]["folders"] == {str(folder): files}
    assert rundir.choose(plan.config) == (run_dir, True)
    change(folder)
    assert str(tmp_path / path) in rundir.changed_data(entry)
    assert rundir.choose(plan.config)[1] is False
    with pytest.raises(UserError, match=rf"{tmp_path / path}.* changed since that run began"):
        rundir.choose(composed(*overrides, f"resume={run_dir}"))


def test_a_container_mounts_the_targets_of_links(tmp_path):
    kept = scored(tmp_path / "runs/1/3_cycle1_sample", "first")
    (tmp_path / "runs/2").mkdir()
    (tmp_path / "runs/2/3_cycle1_sample").symlink_to("../1/3_cycle1_sample")
    config = composed(*DPO, f"data.path={tmp_path}/runs/2", "runtime=docker", "container=cpu")
    mounts = {
        mount.source: mount.read_only
        for mount in mounts_of(config, host_with(0), tmp_path / "run", secrets=False)
    }
    assert mounts[str(tmp_path / "runs/2")]
    assert mounts[kept]
    assert str(Path(kept).parent) not in mounts  # which may be a home directory


def test_an_unreadable_folder_is_an_error(tmp_path, monkeypatch):
    scored(tmp_path / "a", "first")
    scored(tmp_path / "b", "second")
    scandir = os.scandir

    def refused(folder):  # root may read every folder
        if Path(folder).name == "b":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"/b cannot be read \(Permission denied\)\. Use: "):
        sample_files.files(str(tmp_path))
