"""Test that all strategies have the losses of one process, on two ranks with gloo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch.core import json_files
from launch.plan import sealed
from tests.conftest import command

pytestmark = pytest.mark.integration

STEPS = 5
# Two and a half epochs, so that runs resume in the middle of one and at the start of another.
SETTINGS = f"""
hardware=cpu method=sft model=tiny model.num_layers=2 precision=fp32 tracking=none
data.num_train=16 effective_batch=8 method.args.per_device_train_batch_size=2
method.args.max_steps={STEPS} method.args.save_steps=1 method.args.save_total_limit=5
method.args.lr_scheduler_type=linear method.args.warmup_steps=0
""".split()
# The learning rate is large, so that a wrong gradient changes the next loss.
SETTINGS.append("method.args.learning_rate=1e-3")
TWO = ["hardware.gpus_per_node=2", "topology.num_gpus=2"]
# Files of a checkpoint that only rank 1 writes: its shards of weights and optimizer.
PARTS = {
    "single": [],
    "ddp": [],
    "fsdp": ["optimizer_0/__1_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp"],
    "zero2": [f"global_step{STEPS}/zero_pp_rank_1_mp_rank_00_optim_states.pt"],
    "zero3": [
        f"global_step{STEPS}/zero_pp_rank_1_mp_rank_00_{part}_states.pt"
        for part in ("model", "optim")
    ],
}
# Options of FSDP2 that do not affect results. Without a GPU, pin_memory has no effect.
OPTIONS = {
    "fsdp": """
        topology.fsdp.cpu_offload=true hardware.dataloader.pin_memory=true
        topology.fsdp.reshard_after_forward=false topology.fsdp.activation_checkpointing=true
        method.args.gradient_checkpointing=false
    """.split()
}


def train(folder: Path, topology: str, *overrides: str) -> Path:
    done = command(f"topology={topology}", *SETTINGS, *overrides, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line for line in done.stderr.splitlines() if f"done: {STEPS} steps" in line]
    assert any(line.startswith(("trainers | ", "rank 0 | ")) for line in shown), done.stderr
    return run_dir(folder)


def run_dir(folder: Path) -> Path:
    (record,) = folder.glob("runs/*/[0-9]*/record.json")
    return record.parent


def plan_argv(folder: Path) -> str:
    plan = json.loads((run_dir(folder) / "plan.json").read_text())
    (trainers,) = [process for process in plan["processes"] if process["kind"] == "trainer"]
    return " ".join(trainers["argv"])


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Return a run of each topology, on two ranks or, for single, in one process."""
    run_dirs = {}
    with pytest.MonkeyPatch.context() as patch:
        for topology in PARTS:
            folder = tmp_path_factory.mktemp(topology)
            patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "compiled"))
            ranks = [] if topology == "single" else TWO
            run_dirs[topology] = train(folder, topology, *ranks, *OPTIONS.get(topology, []))
    return run_dirs


@pytest.mark.parametrize("topology", PARTS)
def test_strategies_have_losses_and_model_of_one_process(runs, topology):
    """Compare checkpoints, losses and models."""
    saved = runs[topology] / f"checkpoints/checkpoint-{STEPS}"
    parts = sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*_1_*"))
    assert parts == PARTS[topology]
    folder = runs[topology].parents[2]
    assert ("--nproc-per-node 2" in plan_argv(folder)) == (topology != "single")
    # DeepSpeed must not compile, since the cpu image has no compiler.
    assert not (folder / "compiled").exists()

    alone = losses(runs["single"])
    assert len(alone) == STEPS
    assert alone[0] - alone[-1] > 1  # the loss decreases
    assert losses(runs[topology]) == pytest.approx(alone, rel=0, abs=1e-5)

    expected, weights = (
        load_file(runs[name] / "model/model.safetensors") for name in ("single", topology)
    )
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert weights[name].dtype == weight.dtype
        # Adam normalizes gradients, so rounding errors of tiny gradients change weights noticeably.
        assert (weights[name] - weight).abs().mean() < 1e-5, name


# fsdp cannot read a checkpoint of one process.
@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [("single", "ddp", TWO), ("fsdp", "fsdp", ["topology.num_gpus=1"])],
)
def test_resume_on_other_ranks_with_losses_of_one_process(runs, tmp_path, before, after, ranks):
    shutil.copytree(runs[before].parents[2], tmp_path, dirs_exist_ok=True)
    run = run_dir(tmp_path)
    stop_after(run, step=1)
    train(tmp_path, after, *ranks, *OPTIONS.get(after, []), f"resume={run}")
    assert losses(run) == pytest.approx(losses(runs["single"]), rel=0, abs=1e-5)
    logs = "".join(path.read_text() for path in run.glob("logs/*.log"))
    assert f"resuming from {run}/checkpoints/checkpoint-1" in logs
    assert len(json.loads((run / "record.json").read_text())["earlier"]) == 1


def stop_after(run: Path, step: int) -> None:
    """Make the run look as if it had been killed after this step."""
    for path in (run / "checkpoints").glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    shutil.rmtree(run / "model")
    (run / "result.json").unlink()
    record = json_files.read_json(run / "record.json")
    json_files.write_json(run / "record.json", sealed.seal({**record, "status": "failed"}))
