"""resume=<run directory> on other ranks.

Which differences another place makes, and what a checkpoint or the batch forbids.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import reproduce
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import UserError
from launch.execution import record
from launch.plan import resuming, rundir, sealed
from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with, leave_record

EIGHT = [
    "hardware=mi300x",
    "runtime=local",
    "model=qwen3_4b",
    "method.args.per_device_train_batch_size=4",
]
DDP = [*EIGHT, "topology=ddp", "method.args.gradient_accumulation_steps=2"]
ZERO = [*EIGHT, "topology=zero2"]
HALF = ["topology.num_gpus=4", "method.args.gradient_accumulation_steps=2"]
GRPO = [*EIGHT, "method=grpo", "method.args.num_generations=8", "effective_batch=64"]


def stopped(folder: Path, *overrides: str) -> Path:
    """Make the run directory of a run that stopped, with the parts of its record that matter."""
    config, _ = prepare(composed(*overrides))
    leave_record(folder, config, "failed")
    return folder


def begun(folder: Path, *overrides: str) -> dict:
    """Its whole record, as its launcher leaves it."""
    config, _ = prepare(composed(*overrides))
    host = host_with(8)
    plan = make_plan(config, host, folder, request=Request(overrides))
    json_files.write_json(folder / "record.json", record.begin(plan, host, None))
    return json_files.read_json(folder / "record.json")


def resumed(folder: Path, *overrides: str) -> list[str]:
    """Return what the plan says."""
    config, _ = prepare(composed(*overrides, f"resume={folder}"))
    assert rundir.choose(config) == (folder, True)
    return rundir.moved(config, folder)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (DDP, [*EIGHT, "topology=ddp", "topology.num_gpus=4", "effective_batch=64"], "ddp of 8 rank(s) before, topology=ddp of 4 rank(s)"),
        (DDP, [*EIGHT, "topology=single", "effective_batch=64"], "topology=single of 1 rank(s) now: the same sequences per step"),
        ([*EIGHT, "topology=fsdp"], [*EIGHT, "topology=fsdp", *HALF], "sums round"),
        (
            [*DDP, "runtime.slurm.nodes=2", "runtime=slurm", "runtime.slurm.interface=ib0"][1:] + ["hardware=mi300x"],
            [*EIGHT, "topology=ddp", "effective_batch=128"],
            "of 16 rank(s) before",
        ),
        ([*GRPO, "topology=ddp"], [*GRPO, "topology=ddp", "topology.num_gpus=4"], "completions are sampled again"),
        ([*EIGHT[:3], "method=evaluate"], [*EIGHT[:3], "method=evaluate", "topology=single"], "finished batches stay"),
        (DDP, DDP, None),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_elsewhere(tmp_path, before, now, said):
    found = resumed(stopped(tmp_path, *before), *now)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (DDP, [*DDP, "seed=7", "topology.num_gpus=4"], ["another composition", "seed: 0 -> 7"]),
        (DDP, [*EIGHT, "topology=ddp", "topology.num_gpus=4"],
         ["a step took 64 sequences (8 rank(s) x 4 x accumulation 2) and would take", "Use: effective_batch=64"]),
        (DDP, [*EIGHT, "topology=fsdp", "effective_batch=64"], ["format of transformers, which", "Use: topology=ddp;"]),
        ([*EIGHT, "topology=fsdp"], [*EIGHT, "topology=single", "effective_batch=32"], ["format of FSDP2, which", "Use: topology=fsdp;"]),
        (ZERO, [*EIGHT, "topology=zero3"], ["format of ZeRO-2", "Use: topology=zero2;"]),
        (ZERO, [*ZERO, *HALF], ["of 8 rank(s) before", "optimizer's state", "topology=zero2 topology.num_gpus=8", "ddp or fsdp"]),
        ([*GRPO, "topology=split", "topology.num_gpus=5"], [*GRPO, "topology=ddp"], ["another composition", "topology.servers: 1 -> 0"]),
        ([*GRPO, "topology=colocate"], [*GRPO, "topology=single"],
         ["another engine would generate", "topology=colocate topology.num_gpus=1"]),
        ([*GRPO, "topology=ddp", "method.args.steps_per_generation=2"],
         [*GRPO, "topology=ddp", "topology.num_gpus=4", "method.args.steps_per_generation=2"],
         ["64 completions and would have 32", "generation_batch_size=64"]),
        ([*GRPO, "topology=ddp", "data.curriculum=adaptive"], [*GRPO, "topology=ddp", "data.curriculum=adaptive", "topology.num_gpus=4"],
         ["curriculum=adaptive", "per_device_train_batch_size=4 on 8 rank(s)"]),
        (["hardware=mi350x", "runtime=local", "method=tune/batch", "model=qwen3_4b", "topology=ddp"],
         ["hardware=mi350x", "runtime=local", "method=tune/batch", "model=qwen3_4b", "topology=ddp", "topology.num_gpus=4"],
         ["only a training, an evaluation", "topology=ddp topology.num_gpus=8"]),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused_with_what_to_give(tmp_path, before, now, words):
    with pytest.raises(UserError) as raised:
        resumed(stopped(tmp_path, *before), *now)
    said = str(raised.value)
    assert said.startswith(f"resume={tmp_path}: ")
    assert [word for word in words if word not in said] == []
    assert "resume=never" in said or "another composition" in said


def test_auto_goes_on_with_the_same_composition_only(tmp_path):
    home = f"run_root={tmp_path}"
    stopped(tmp_path / "sft-qwen3_4b-mi300x/1", *DDP)
    assert rundir.choose(prepare(composed(*DDP, home))[0])[1] is True
    assert (
        rundir.choose(
            prepare(
                composed(*EIGHT, "topology=ddp", "topology.num_gpus=4", "effective_batch=64", home)
            )[0]
        )[1]
        is False
    )


def test_the_record_keeps_what_the_run_was_before(tmp_path, capsys, monkeypatch):
    for _ in range(2):
        assert begun(tmp_path, *DDP)["earlier"] == []
    for _ in range(2):
        kept = begun(tmp_path, *EIGHT, "topology=single", "effective_batch=64")
    assert [before["overrides"] for before in kept["earlier"]] == [DDP]
    assert sealed.faults(kept) == []
    assert resuming.recorded_config(kept["composition"]).topology.name == "single"
    monkeypatch.setattr(reproduce, "check_host", lambda plan, host: reproduce.sys.exit(0))
    with pytest.raises(SystemExit):
        reproduce.reproduce_one(tmp_path, {**kept, "status": "done"}, [])
    assert "used other ranks (hardware=mi300x" in capsys.readouterr().out
