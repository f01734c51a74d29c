"""Test a training that is stopped and resumes on other ranks, by resume=, with gloo.

It has the same batches, and the losses of one process.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launch.core import json_files
from launch.plan import sealed
from tests.conftest import command
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

STEPS, BATCH = 5, 8
SETTINGS = [
    *[
        "hardware=cpu",
        "method=sft",
        "model=tiny",
        "model.num_layers=2",
        "precision=fp32",
        "tracking=none",
    ],
    # Two and a half epochs, so that runs resume in the middle of one and at the start of another.
    *[
        "data.num_train=16",
        f"effective_batch={BATCH}",
        "method.args.per_device_train_batch_size=4",
        f"method.args.max_steps={STEPS}",
    ],
    *[
        "method.args.learning_rate=1e-3",
        "method.args.lr_scheduler_type=linear",
        "method.args.warmup_steps=0",
    ],
    *["method.args.save_steps=1", "method.args.save_total_limit=5"],
]
PLACES = {
    "single": ["topology=single"],
    "ddp2": ["topology=ddp", "hardware.gpus_per_node=2", "topology.num_gpus=2"],
    "fsdp1": ["topology=fsdp", "topology.num_gpus=1"],
    "fsdp2": ["topology=fsdp", "hardware.gpus_per_node=2", "topology.num_gpus=2"],
}


def train(place: str, folder: Path, *overrides: str) -> Path:
    done = command(*SETTINGS, *PLACES[place], *overrides, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("runs/*/*/record.json")
    return found.parent


def stop_after(run_dir: Path, step: int) -> None:
    """Leave the run as if it had been killed after this step."""
    for path in (run_dir / "checkpoints").glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    shutil.rmtree(run_dir / "model")
    (run_dir / "result.json").unlink()
    kept = json_files.read_json(run_dir / "record.json")
    json_files.write_json(run_dir / "record.json", sealed.seal({**kept, "status": "failed"}))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, list[float]]:
    """Return the run of one process without interruption, and its losses."""
    run_dir = train("single", tmp_path_factory.mktemp("single"))
    return run_dir, losses(run_dir)


@pytest.mark.parametrize("places", [["ddp2", "single"], ["fsdp2", "fsdp1", "fsdp2"]])
def test_a_run_goes_on_on_other_ranks_and_on_its_own_again(tmp_path_factory, alone, places):
    run_dir, expected = alone
    assert len(expected) == STEPS
    if places[0] == "fsdp2":  # reads no checkpoint of one process
        run_dir, places = train("fsdp2", tmp_path_factory.mktemp("fsdp")), places[1:]
    # First from the first checkpoint, then from one that those ranks wrote.
    for step, place in enumerate(places, start=1):
        stop_after(run_dir, step)
        train(place, run_dir.parents[2], f"resume={run_dir}")
        assert losses(run_dir) == pytest.approx(expected, rel=0, abs=1e-5)
        assert f"resuming from {run_dir}/checkpoints/checkpoint-{step}" in "".join(
            p.read_text() for p in run_dir.glob("logs/*.log")
        )
    assert len(json.loads((run_dir / "record.json").read_text())["earlier"]) == len(places)
