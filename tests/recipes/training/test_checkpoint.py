"""Test recipes/training/checkpoint.py: complete and damaged checkpoints, and rotation."""

import json

import pytest

from recipes.training import checkpoint


def save(directory, step, content="weights", best=None):
    staged = directory / checkpoint.STAGING / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_text(content)
    (staged / "trainer_state.json").write_text(json.dumps({"best_global_step": best}))
    checkpoint.seal(staged, directory / f"checkpoint-{step}")
    return directory / f"checkpoint-{step}"


def test_newest_by_number(tmp_path):
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert checkpoint.newest(tmp_path).name == "checkpoint-100"
    assert checkpoint.newest(tmp_path / "none") is None


def test_rotation_keeps_the_best_checkpoint(tmp_path):
    for step, best in ((2, 2), (4, 2), (6, 6), (8, 6), (10, 6)):
        save(tmp_path, step, best=best)
    checkpoint.rotate(tmp_path, 2)
    steps = lambda: sorted(map(checkpoint.step_of, tmp_path.glob("checkpoint-*")))  # noqa: E731
    assert steps() == [6, 8, 10]
    # A damaged checkpoint does not stop training.
    (tmp_path / "checkpoint-8/trainer_state.json").write_text('{"best')
    checkpoint.rotate(tmp_path, 2)
    checkpoint.rotate(tmp_path, 1)
    assert steps() == [6, 10]


def test_checkpoints_with_a_damaged_best_are_skipped(tmp_path, capsys):
    for step in (2, 4, 6):
        save(tmp_path, step, best=min(step, 4))
    truncate(tmp_path / "checkpoint-4")
    assert checkpoint.newest(tmp_path).name == "checkpoint-2"
    log = capsys.readouterr().out
    assert "checkpoint-6 is incomplete: its best checkpoint checkpoint-4 is incomplete: " in log
    assert "checkpoint-4 is incomplete: model.safetensors has" in log


def truncate(path):
    (path / "model.safetensors").write_text("wei")


@pytest.mark.parametrize(("name", "content", "fault"), [
    ("model.safetensors", "wei", "model.safetensors has 3 of 7 bytes"),
    ("model.safetensors", "WEIGHTS", "the contents of model.safetensors have changed"),
    (checkpoint.MANIFEST, "", "manifest.json cannot be read"),
    (checkpoint.MANIFEST, '{"files": {', "manifest.json cannot be read"),
])  # fmt: skip
def test_damaged_checkpoints_are_skipped(tmp_path, capsys, name, content, fault):
    save(tmp_path, 1)
    (save(tmp_path, 2) / name).write_text(content)
    assert checkpoint.newest(tmp_path).name == "checkpoint-1"
    assert fault in capsys.readouterr().out


def test_interrupted_saves_are_cleared(tmp_path):
    truncate(save(tmp_path, 1))
    (tmp_path / checkpoint.STAGING / "checkpoint-5").mkdir(parents=True)
    assert checkpoint.newest(tmp_path) is None
    checkpoint.clear_staging(tmp_path)
    assert not (tmp_path / checkpoint.STAGING).exists()


def test_a_directory_replaces_an_older_one(tmp_path):
    save(tmp_path, 1, "old")
    assert (save(tmp_path, 1, "new") / "model.safetensors").read_text() == "new"
    assert not (tmp_path / ".checkpoint-1.old").exists()
