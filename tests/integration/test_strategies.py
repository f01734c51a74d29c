"""Test ways to spread a training over processes, with gloo in place of RCCL.

The same seed and global batch give the same losses.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import command

pytestmark = pytest.mark.integration

STEPS, BATCH = 4, 8
SETTINGS = [
    *[
        "hardware=cpu",
        "model=tiny",
        "model.num_layers=2",
        "precision=fp32",
        "data.num_train=64",
        "tracking=none",
    ],
    *[
        f"effective_batch={BATCH}",
        "method.args.per_device_train_batch_size=4",
        f"method.args.max_steps={STEPS}",
    ],
    # A step large enough that a gradient that is wrong shows in the next loss.
    *[
        "method.args.learning_rate=1e-3",
        "method.args.lr_scheduler_type=constant",
        "method.args.warmup_steps=0",
    ],
    f"method.args.save_steps={STEPS}",
]
# What rank 1 alone has written into a checkpoint: its part of the weights, and of the optimizer.
SHARDED = ["optimizer_0/__1_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp"]
PARTS = {
    "single": [],
    "ddp": [],
    "fsdp": SHARDED,
    "fsdp-offload": SHARDED,
    "zero2": [f"global_step{STEPS}/zero_pp_rank_1_mp_rank_00_optim_states.pt"],
    "zero3": [
        f"global_step{STEPS}/zero_pp_rank_1_mp_rank_00_{part}_states.pt"
        for part in ("model", "optim")
    ],
}
# FSDP2's options, which change where its tensors are and when, and no number.
OFFLOAD = [
    # Without a GPU pin_memory pins nothing.
    *["topology.fsdp.cpu_offload=true", "hardware.dataloader.pin_memory=true"],
    "topology.fsdp.reshard_after_forward=false",
    *["topology.fsdp.activation_checkpointing=true", "method.args.gradient_checkpointing=false"],
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Return the run of each topology: two ranks, or one process that accumulates."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for topology in PARTS:
            folder = tmp_path_factory.mktemp(topology)
            patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "compiled"))
            two = (
                [] if topology == "single" else ["hardware.gpus_per_node=2", "topology.num_gpus=2"]
            )
            name, _, offload = topology.partition("-")
            done = command(
                "method=sft",
                f"topology={name}",
                *two,
                *SETTINGS,
                *(OFFLOAD if offload else []),
                cwd=folder,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            (record,) = folder.glob("runs/*/*/record.json")
            found[topology] = record.parent
            shown = done.stderr.splitlines()
            speaks = "trainers | " if topology == "single" else "rank 0 | "
            assert f"done: {STEPS} steps" in "".join(
                line for line in shown if line.startswith(speaks)
            ), done.stderr
    return found


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("topology", PARTS)
def test_the_strategy_that_was_asked_for_ran(runs, topology):
    """Check what the ranks left; recipes/training/training.py rejects another strategy too."""
    saved = runs[topology] / "checkpoints" / f"checkpoint-{STEPS}"
    assert (
        sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*_1_*"))
        == PARTS[topology]
    )
    plan = json.loads((runs[topology] / "plan.json").read_text())
    (trainers,) = [process for process in plan["processes"] if process["kind"] == "trainer"]
    assert plan["topology"] == topology.partition("-")[0]
    asks_torchrun_for_two = "--nproc-per-node 2" in " ".join(trainers["argv"])
    assert asks_torchrun_for_two == (topology != "single")


@pytest.mark.parametrize("topology", [name for name in PARTS if name != "single"])
def test_every_step_has_the_loss_of_a_single_process(runs, topology):
    alone = losses(runs["single"])
    assert len(alone) == STEPS
    assert alone[0] - alone[-1] > 1  # it learned: the steps changed the weights
    assert losses(runs[topology]) == pytest.approx(alone, rel=0, abs=1e-5)


@pytest.mark.parametrize("topology", [name for name in PARTS if name != "single"])
def test_the_model_it_leaves_is_whole(runs, topology):
    alone, spread = (
        load_file(runs[name] / "model" / "model.safetensors") for name in ("single", topology)
    )
    assert spread.keys() == alone.keys()
    for name, weight in alone.items():
        assert spread[name].dtype == weight.dtype
        # Adam divides a gradient by its own size. If that is near zero, its rounding error moves a
        # weight by a part of the learning rate.
        assert (spread[name] - weight).abs().mean() < 1e-5, name


@pytest.mark.parametrize("topology", ["zero2", "zero3"])
def test_deepspeed_needs_no_compiler(runs, topology):
    """Check that nothing was compiled, since the cpu image has no compiler."""
    assert not (runs[topology].parents[2] / "compiled").exists()
