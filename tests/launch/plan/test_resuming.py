"""Test which runs resume=<run directory> can resume on other ranks, and the errors for others."""

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


def stop_run(folder: Path, *overrides: str) -> Path:
    """Make the directory of a stopped run, with the fields of its record that resuming reads."""
    config, _ = prepare(composed(*overrides))
    leave_record(folder, config, "failed")
    return folder


def begin_run(folder: Path, *overrides: str) -> dict:
    """Write the complete record of a run that begins, as the launcher does, and return it."""
    config, _ = prepare(composed(*overrides))
    host = host_with(8)
    plan = make_plan(config, host, folder, request=Request(overrides))
    json_files.write_json(folder / "record.json", record.begin(plan, host, None))
    return json_files.read_json(folder / "record.json")


def resume(folder: Path, *overrides: str) -> list[str]:
    """Return the plan's notes about the resumed run."""
    config, _ = prepare(composed(*overrides, f"resume={folder}"))
    assert rundir.choose(config) == (folder, True)
    return resuming.notes(config, folder)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (DDP, [*EIGHT, "topology=ddp", "topology.num_gpus=4", "effective_batch=64"], "ddp with 8 rank(s) before, topology=ddp with 4 rank(s)"),
        (DDP, [*EIGHT, "topology=single", "effective_batch=64"], "topology=single with 1 rank(s) now. The order of rows"),
        ([*EIGHT, "topology=fsdp"], [*EIGHT, "topology=fsdp", *HALF], "Sums round"),
        (
            [*DDP, "runtime.slurm.nodes=2", "runtime=slurm", "runtime.slurm.interface=ib0"][1:] + ["hardware=mi300x"],
            [*EIGHT, "topology=ddp", "effective_batch=128"],
            "with 16 rank(s) before",
        ),
        ([*GRPO, "topology=ddp"], [*GRPO, "topology=ddp", "topology.num_gpus=4"], "Completions are sampled again"),
        ([*EIGHT[:3], "method=evaluate"], [*EIGHT[:3], "method=evaluate", "topology=single"], "Finished batches are reused"),
        (DDP, DDP, None),
    ],
)  # fmt: skip
def test_a_run_resumes_on_other_ranks(tmp_path, before, now, message):
    notes = resume(stop_run(tmp_path, *before), *now)
    assert len(notes) == (message is not None)
    assert message is None or message in notes[0]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (DDP, [*DDP, "seed=7", "topology.num_gpus=4"], ["another composition", "seed: 0 -> 7"]),
        (DDP, [*EIGHT, "topology=ddp", "topology.num_gpus=4"],
         ["a step had 64 sequences (8 rank(s) x 4 x accumulation 2) and would have", "Use: effective_batch=64"]),
        (DDP, [*EIGHT, "topology=fsdp", "effective_batch=64"], ["cannot read checkpoints of transformers. ", "Use: topology=ddp;"]),
        ([*EIGHT, "topology=fsdp"], [*EIGHT, "topology=single", "effective_batch=32"], ["cannot read checkpoints of FSDP2. ", "Use: topology=fsdp;"]),
        (ZERO, [*EIGHT, "topology=zero3"], ["cannot read checkpoints of ZeRO-2. ", "Use: topology=zero2;"]),
        (ZERO, [*ZERO, *HALF], ["with 8 rank(s) before", "optimizer's state", "topology=zero2 topology.num_gpus=8", "topology=fsdp can resume"]),
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
         ["only training, evaluation", "topology=ddp topology.num_gpus=8"]),
    ],
)  # fmt: skip
def test_a_run_that_cannot_resume_is_rejected_with_a_remedy(tmp_path, before, now, words):
    with pytest.raises(UserError) as raised:
        resume(stop_run(tmp_path, *before), *now)
    message = str(raised.value)
    assert message.startswith(f"resume={tmp_path}: ")
    assert [word for word in words if word not in message] == []
    assert "resume=never" in message or "another composition" in message


def test_auto_resumes_only_the_same_composition(tmp_path):
    home = f"run_root={tmp_path}"
    stop_run(tmp_path / "sft-qwen3_4b-mi300x/1", *DDP)
    assert rundir.choose(prepare(composed(*DDP, home))[0])[1] is True
    assert (
        rundir.choose(
            prepare(
                composed(*EIGHT, "topology=ddp", "topology.num_gpus=4", "effective_batch=64", home)
            )[0]
        )[1]
        is False
    )


def test_the_record_keeps_earlier_parts_of_the_run(tmp_path, capsys, monkeypatch):
    for _ in range(2):
        assert begin_run(tmp_path, *DDP)["earlier"] == []
    for _ in range(2):
        latest = begin_run(tmp_path, *EIGHT, "topology=single", "effective_batch=64")
    assert [before["overrides"] for before in latest["earlier"]] == [DDP]
    assert sealed.problems(latest) == []
    assert resuming.recorded_config(latest["composition"]).topology.name == "single"
    monkeypatch.setattr(reproduce, "check_host", lambda plan, host: reproduce.sys.exit(0))
    with pytest.raises(SystemExit):
        reproduce.reproduce_one(tmp_path, {**latest, "status": "done"}, [])
    assert "used other ranks (hardware=mi300x" in capsys.readouterr().out
