"""Test the loader benchmark: sizes by hardware, rows like SFT's, and workers that die."""

import os

import datasets
import pytest
import torch
from omegaconf import OmegaConf
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from launch.core.errors import UserError
from recipes.bench import dataloader
from recipes.bench.dataloader import NUM_WORKERS, DataloaderConfig
from tests.helpers.bench_config import bench_config

SMALL = {"rows": 16, "sequence": 8, "batch_size": 4, "batches": 3, "warmup": 1, "step_ms": 0.1}


def hardware(name, num_workers, pin_memory):
    return OmegaConf.create(
        {"name": name, "dataloader": {"num_workers": num_workers, "pin_memory": pin_memory}}
    )


def test_hardware_limits_the_series_unless_the_arguments_name_it():
    args, limited = DataloaderConfig(output_dir="x"), hardware("strix_halo", 0, False)
    whole = dataloader.series(args, hardware("mi300x", 4, True))
    assert whole == (NUM_WORKERS, [False, True], [])
    workers, pins, (note,) = dataloader.series(args, limited)
    assert (workers, pins) == ([0], [False])
    assert "num_workers=0 and pin_memory=false" in note
    assert "conf/hardware/strix_halo.yaml" in note
    args.num_workers = [0, 4]
    workers, pins, (note,) = dataloader.series(args, limited)
    assert (workers, pins) == ([0, 4], [False])
    assert "num_workers" not in note


def test_rows_are_padded_as_for_training():
    rows = dataloader.tokenized(DataloaderConfig(output_dir="x", **SMALL))
    batch = DataCollatorForLanguageModeling(pad_token_id=0)([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 8)
    assert (batch["labels"][:, :4] == -100).all()
    assert (batch["labels"][:, 4:] == batch["input_ids"][:, 4:]).all()


def test_every_case_is_measured(tmp_path):
    result = dataloader.dataloader(bench_config(tmp_path, num_workers=[0, 1], **SMALL))
    actual = [(row["num_workers"], row["pin_memory"], row["with_step"]) for row in result["rows"]]
    assert actual == [(0, False, False), (0, False, True), (1, False, False), (1, False, True)]
    for row in result["rows"]:
        assert row["error"] is None
        assert row["samples_per_second"] == pytest.approx(4 / row["batch_ms"] * 1e3)
        assert 0 < row["wait_ms"] < row["batch_ms"]
    assert any("Only pin_memory=false" in note for note in result["notes"])


class Deadly(datasets.Dataset):
    """Hold rows that end the process which reads them."""

    def __getitems__(self, keys):
        os._exit(9)


def test_a_worker_that_dies_is_a_row():
    rows = Deadly.from_dict({"input_ids": [[1, 2]] * 16})
    case = {"num_workers": 1, "pin_memory": False, "with_step": False}
    with pytest.raises(UserError, match="the loader failed: DataLoader worker"):
        dataloader.measure_one(
            case, DataloaderConfig(output_dir="x", **SMALL), rows, lambda: None, torch.device("cpu")
        )
