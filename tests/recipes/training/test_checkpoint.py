"""Test recipes/training/checkpoint.py: complete and damaged checkpoints, and rotation."""

import errno
import json
import resource

import pytest

from recipes.rank import files
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
    (checkpoint.MANIFEST, '["files"]', "manifest.json cannot be read"),
    (checkpoint.MANIFEST, '{"files": ["model.safetensors"]}', "manifest.json cannot be read"),
    (checkpoint.MANIFEST, '{"files": {"model.safetensors": 7}}', "manifest.json cannot be read"),
    (checkpoint.MANIFEST, '{"files": {}}', "manifest.json does not name model.safetensors"),
    ("adapter_model.safetensors", "", "manifest.json does not name adapter_model.safetensors"),
])  # fmt: skip
def test_damaged_checkpoints_are_skipped(tmp_path, capsys, name, content, fault):
    save(tmp_path, 1)
    (save(tmp_path, 2) / name).write_text(content)
    assert checkpoint.newest(tmp_path).name == "checkpoint-1"
    assert fault in capsys.readouterr().out


def test_an_empty_checkpoint_is_not_whole(tmp_path):
    staged = tmp_path / checkpoint.STAGING / "checkpoint-2"
    staged.mkdir(parents=True)
    checkpoint.seal(staged, tmp_path / "checkpoint-2")
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.parametrize("place", [
    lambda path: path.write_text("a file"),
    lambda path: path.symlink_to(path.with_name("nowhere")),
    lambda path: path.symlink_to(path),
    lambda path: path.with_name("checkpoint-²").mkdir(),
])  # fmt: skip
def test_entries_that_are_not_checkpoints_are_skipped_and_replaced(tmp_path, place):
    save(tmp_path, 1)
    place(tmp_path / "checkpoint-2")
    assert checkpoint.newest(tmp_path).name == "checkpoint-1"
    for _ in range(2):
        assert checkpoint.find_error(save(tmp_path, 2)) is None
    checkpoint.rotate(tmp_path, 1)
    assert checkpoint.newest(tmp_path).name == "checkpoint-2"


def test_a_linked_checkpoint_is_used_and_only_its_link_is_rotated_away(tmp_path):
    moved = save(tmp_path, 1).rename(tmp_path / "moved")
    (tmp_path / "checkpoint-1").symlink_to(moved)
    assert checkpoint.newest(tmp_path).name == "checkpoint-1"
    save(tmp_path, 2)
    checkpoint.rotate(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("[cm]*")) == ["checkpoint-2", "moved"]
    assert checkpoint.find_error(moved) is None


def test_rotation_counts_no_checkpoint_that_was_passed_over(tmp_path):
    """A run resumed from step 4, because checkpoint 8 is damaged, and was stopped in step 5."""
    for step in (4, 8, 5):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoint-8")
    checkpoint.rotate(tmp_path, 1, step=5)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]


def test_a_save_that_nothing_can_hold_names_the_directory_and_is_removed(tmp_path):
    """A limit of the file size stands for a full disk and a quota, which users cannot make."""
    staged = tmp_path / "staged"
    staged.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error, files.staging(staged):
            raise RuntimeError("basic_ios::clear: iostream error")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path))
    assert not staged.exists()
    with pytest.raises(RuntimeError), files.staging(staged):
        raise RuntimeError("another error")


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
