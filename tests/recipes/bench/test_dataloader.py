"""Test the benchmark of the data loader: limits of the hardware, and workers that die."""

import os

import datasets
import pytest

from launch.core.json_files import plain
from recipes.bench import dataloader
from recipes.bench.dataloader import NUM_WORKERS
from recipes.rank.program import Failed
from tests.conftest import composed
from tests.helpers.bench_config import bench_config

SMALL = {"rows": 16, "sequence": 8, "batch_size": 4, "batches": 3, "warmup": 1, "step_ms": 0.1}


@pytest.mark.parametrize(("hardware", "args", "expected", "num_notes"), [
    ("mi300x", {}, [(n, pin) for n in NUM_WORKERS for pin in (False, True)], 0),
    ("mi50", {}, [(n, pin) for n in NUM_WORKERS for pin in (False, True)], 0),
    ("strix_halo", {}, [(0, False)], 1),
    ("strix_halo", {"num_workers": [0, 4]}, [(0, False), (4, False)], 1),
    ("strix_halo", {"num_workers": [4], "pin_memory": [True]}, [(4, True)], 0),
])  # fmt: skip
def test_hardware_limits_the_series_unless_the_arguments_set_it(
    tmp_path, monkeypatch, hardware, args, expected, num_notes
):
    series = []
    monkeypatch.setattr(dataloader, "measure", lambda *more: series.extend(more[2:4]))
    config = bench_config(tmp_path, steps=[False], **SMALL, **args)
    composition = composed(f"hardware={hardware}", "method=bench/dataloader")
    config.hardware = plain(composition.hardware)
    assert config.hardware.dataloader.num_workers == (4 if hardware == "mi300x" else 0)
    dataloader.dataloader(config)
    table, cases = series
    assert [(case["num_workers"], case["pin_memory"]) for case in cases] == expected
    assert sum("conf/hardware" in note for note in table.notes) == num_notes


class Deadly(datasets.Dataset):
    """Rows that end the process that reads them."""

    def __getitems__(self, keys):
        os._exit(9)


def test_a_dying_worker_fails_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr(
        dataloader, "tokenized", lambda args: Deadly.from_dict({"input_ids": [[1, 2]] * 16})
    )
    config = bench_config(tmp_path, num_workers=[1], steps=[False], **SMALL)
    with pytest.raises(Failed, match="DataLoader worker"):
        dataloader.dataloader(config)
