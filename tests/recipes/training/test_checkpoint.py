"""Test that checkpoints are whole or rejected, the previous one is used, old ones are removed."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from launch.core import json_files
from recipes.rank import files
from recipes.sampling import generation
from recipes.training import checkpoint


def save(directory, step, content="weights", best=None):
    staged = directory / checkpoint.STAGING / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_text(content)
    (staged / "trainer_state.json").write_text(json.dumps({"best_global_step": best}))
    checkpoint.seal(staged, directory / f"checkpoint-{step}")
    return directory / f"checkpoint-{step}"


def test_the_newest_by_number_is_used(tmp_path):
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert checkpoint.newest(tmp_path).name == "checkpoint-100"
    assert checkpoint.newest(tmp_path / "none") is None


def test_rotation_keeps_the_best_checkpoint(tmp_path):
    for step, best in ((2, 2), (4, 2), (6, 6), (8, 6), (10, 6)):
        save(tmp_path, step, best=best)
    checkpoint.rotate(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-6",
        "checkpoint-8",
    ]
    # A damaged one ends no training.
    (tmp_path / "checkpoint-8/trainer_state.json").write_text('{"best')
    checkpoint.rotate(tmp_path, 2)
    checkpoint.rotate(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-6",
    ]


def test_checkpoints_with_a_damaged_best_are_skipped(tmp_path, capsys):
    for step in (2, 4, 6):
        save(tmp_path, step, best=min(step, 4))
    truncate(tmp_path / "checkpoint-4")
    assert checkpoint.newest(tmp_path).name == "checkpoint-2"
    log = capsys.readouterr().out
    assert (
        "checkpoint-6 is not whole: in the best before it, checkpoint-4, model.safetensors has 3 "
        in log
    )
    assert "checkpoint-4 is not whole: model.safetensors has" in log


def truncate(path):
    (path / "model.safetensors").write_text("wei")


def change(path):
    (path / "model.safetensors").write_text("WEIGHTS")


def unseal(path):
    (path / checkpoint.MANIFEST).unlink()


def cut_manifest(path):
    (path / checkpoint.MANIFEST).write_text('{"files": {')


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (truncate, "model.safetensors has 3 bytes of 7"),
        (change, "the content of model.safetensors has changed"),
        (unseal, "its manifest.json cannot be read"),
        (cut_manifest, "its manifest.json cannot be read"),
    ],
)
def test_damaged_checkpoints_are_skipped(tmp_path, capsys, damage, fault):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    assert checkpoint.newest(tmp_path).name == "checkpoint-1"
    assert fault in capsys.readouterr().out


def test_interrupted_saves_are_cleared(tmp_path):
    truncate(save(tmp_path, 1))
    (tmp_path / checkpoint.STAGING / "checkpoint-5").mkdir(parents=True)
    assert checkpoint.newest(tmp_path) is None
    checkpoint.clear_staging(tmp_path)
    assert not (tmp_path / checkpoint.STAGING).exists()


class Beats:
    """Count the beats of a heart."""

    count = 0

    def touch(self):
        self.count += 1


def hash_for_a_save(directory, heartbeat):
    staged = directory / checkpoint.STAGING / "checkpoint-3"
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_text("weights")
    checkpoint.seal(staged, directory / "checkpoint-3", heartbeat)


@pytest.mark.parametrize(
    "hash_all",
    [
        hash_for_a_save,
        checkpoint.newest,
        lambda directory, heartbeat: files.weights_sha256(directory / "checkpoint-2", heartbeat),
    ],
    ids=["save", "resume", "model"],
)
def test_the_heart_beats_while_a_large_file_is_hashed(tmp_path, monkeypatch, hash_all):
    """Beat after every block, here two bytes of seven, for launch/execution/watchdog.py."""
    save(tmp_path / "checkpoints", 2)
    beats = Beats()
    monkeypatch.setattr(json_files, "BLOCK", 2)
    hash_all(tmp_path / "checkpoints", beats)
    assert beats.count >= 4


def test_the_heart_beats_once_a_second_while_tokens_are_generated():
    """Beat with the first token and a second or more after the last beat; one takes 0.4 s."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4,
            hidden_size=4,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    token, beats, seen, clock = torch.tensor([[1]]), Beats(), [], [0.0]
    with generation.beat_by_token(model, beats, lambda: clock[0]):
        for clock[0] in (0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4):
            model(token)
            seen.append(beats.count)
    assert seen == [1, 1, 1, 2, 2, 2, 3]
    clock[0] = 10.0
    model(token)
    assert beats.count == 3, "training says itself how it gets on"


def test_a_directory_replaces_an_older_one(tmp_path):
    save(tmp_path, 1, "old")
    assert (save(tmp_path, 1, "new") / "model.safetensors").read_text() == "new"
    assert not (tmp_path / ".checkpoint-1.old").exists()


def test_the_first_rank_to_place_a_directory_wins(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"staged{rank}").mkdir()
        (tmp_path / f"staged{rank}/weights").write_text(str(rank))
        files.place_directory(tmp_path / f"staged{rank}", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model/weights").read_text() == "0"
    with pytest.raises(OSError, match="staged2"):
        files.place_directory(tmp_path / "staged2", tmp_path / "other")
