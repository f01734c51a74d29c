"""The loader benchmark: what it measures on which hardware, rows as SFT has them, and workers that die."""

import os

import datasets
import pytest
import torch
from omegaconf import OmegaConf
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from recipes.bench import dataloader
from recipes.bench.dataloader import NUM_WORKERS, DataloaderConfig
from recipes.common.errors import UserError
from tests.unit.bench_config import bench_config

SMALL = {"rows": 16, "sequence": 8, "batch_size": 4, "batches": 3, "warmup": 1, "step_ms": 0.1}


def hardware(name, num_workers, pin_memory):
    return OmegaConf.create({"name": name, "dataloader": {"num_workers": num_workers, "pin_memory": pin_memory}})


def test_a_discrete_gpu_gets_the_whole_series():
    assert dataloader.series(DataloaderConfig(output_dir="x"), hardware("mi300x", 4, True)) == (NUM_WORKERS, [False, True], None)


def test_hardware_that_workers_hang_is_spared_and_the_note_says_why():
    workers, pins, note = dataloader.series(DataloaderConfig(output_dir="x"), hardware("strix_halo", 0, False))
    assert (workers, pins) == ([0], [False])
    for word in ("num_workers=0", "pin_memory=false", "conf/hardware/strix_halo.yaml", "method.args.num_workers=[0,1,2,4,8]"):
        assert word in note


def test_what_the_arguments_name_is_measured():
    args = DataloaderConfig(output_dir="x", num_workers=[0, 4])
    workers, pins, note = dataloader.series(args, hardware("strix_halo", 0, False))
    assert (workers, pins) == ([0, 4], [False])
    assert "num_workers" not in note
    assert "pin_memory" in note


def test_rows_are_padded_as_for_training():
    rows = dataloader.tokenized(DataloaderConfig(output_dir="x", **SMALL))
    batch = DataCollatorForLanguageModeling(pad_token_id=0)([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 8)
    assert (batch["labels"][:, :4] == -100).all()
    assert (batch["labels"][:, 4:] == batch["input_ids"][:, 4:]).all()


def test_every_case_is_measured(tmp_path):
    result = dataloader.dataloader(bench_config(tmp_path, num_workers=[0, 1], **SMALL))
    found = [(row["num_workers"], row["pin_memory"], row["with_step"]) for row in result["rows"]]
    assert found == [(0, False, False), (0, False, True), (1, False, False), (1, False, True)]
    for row in result["rows"]:
        assert row["error"] is None
        assert row["samples_per_second"] == pytest.approx(4 / row["batch_ms"] * 1e3)
        assert 0 < row["wait_ms"] < row["batch_ms"]
    assert any("Only pin_memory=false" in note for note in result["notes"])


class Deadly(datasets.Dataset):
    """Rows that end the process which reads them."""

    def __getitems__(self, keys):
        os._exit(9)


def test_a_worker_that_dies_is_a_row():
    rows = Deadly.from_dict({"input_ids": [[1, 2]] * 16})
    case = {"num_workers": 1, "pin_memory": False, "with_step": False}
    with pytest.raises(UserError, match="the loader failed: DataLoader worker"):
        dataloader.one(case, DataloaderConfig(output_dir="x", **SMALL), rows, lambda: None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"num_workers": []}, ["num_workers=[]", "nothing"]),
        ({"num_workers": [-1]}, ["num_workers=[-1]", "at least 0"]),
        ({"batches": 0}, ["batches=0"]),
        ({"rows": 4, "batch_size": 8}, ["rows=4", "one batch of 8"]),
    ],
)
def test_bad_arguments_are_named(args, words):
    with pytest.raises(UserError) as refused:
        DataloaderConfig(output_dir="x", **args)
    assert all(word in str(refused.value) for word in words)
