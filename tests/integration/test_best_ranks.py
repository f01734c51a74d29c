"""Test the best model on two ranks, with gloo in place of RCCL.

A run ends with what its best checkpoint holds, even if it was killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.conftest import ROOT
from tests.e2e.test_best_checkpoint import BEST, chosen
from tests.e2e.test_resume import computed, configure

pytestmark = pytest.mark.integration

SAVE_STEPS = 2
LENGTH = [
    "method.args.max_steps=24",
    f"method.args.save_steps={SAVE_STEPS}",
    "method.selection.patience=2",
    "precision=fp32",
]
LORA = ["adapter=lora", "adapter.rank=4"]
KINDS = {
    "fsdp": {
        "sharded": [],
        "full": ["topology.fsdp.state_dict_type=FULL_STATE_DICT"],
        "lora": LORA,
    },
    "zero2": {"plain": []},
    "zero3": {"plain": [], "lora": LORA},
}
RUNS = ("whole", "killed", "ended")


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tmp_path_factory) -> dict[str, Path]:
    """Return kind -> a directory with the runs of tests/integration/best_ranks.py on two ranks."""
    home = tmp_path_factory.mktemp(request.param)
    shared = [
        f"topology={request.param}",
        "hardware.gpus_per_node=2",
        "topology.num_gpus=2",
        "method.args.per_device_train_batch_size=4",
    ]
    folders = {kind: home / kind for kind in KINDS[request.param]}
    for kind, folder in folders.items():
        folder.mkdir()
        for name in RUNS:
            configure(folder / name, "sft", *BEST, *LENGTH, *shared, *KINDS[request.param][kind])
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.integration.best_ranks",
    ]
    done = subprocess.run(
        [*argv, str(SAVE_STEPS), *folders.values()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folders


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def weights(saved: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights of a checkpoint.

    FSDP spreads them over the ranks, or writes them to a file of its own.
    """
    spread = saved / "pytorch_model_fsdp_0"
    if spread.is_dir():
        dcp_to_torch_save(spread, scratch)
        held = torch.load(scratch, weights_only=True)["model"]
        # `default` is PEFT's name of the adapter.
        return {name.replace(".default.", "."): weight for name, weight in held.items()}
    if (saved / "pytorch_model_fsdp.bin").is_file():
        return torch.load(saved / "pytorch_model_fsdp.bin", weights_only=True)
    return load_file(next(saved.glob("*model.safetensors")))


def test_the_model_is_that_of_the_best_checkpoint(runs, tmp_path):
    """Compare with the last one too, which the ranks hold when training ends."""
    for kind, folder in runs.items():
        whole, found = folder / "whole", result(folder / "whole")
        measured = {row["step"]: row["eval_loss"] for row in computed(whole) if "eval_loss" in row}
        assert found["best_step"] == min(measured, key=measured.get) < found["steps"], kind
        kept = load_file(
            whole
            / ("adapter/adapter_model.safetensors" if kind == "lora" else "model/model.safetensors")
        )
        best, last = (
            weights(whole / f"checkpoints/checkpoint-{found[key]}", tmp_path / key)
            for key in ("best_step", "steps")
        )
        assert all(weight.equal(best[name]) for name, weight in kept.items()), kind
        assert not all(weight.equal(last[name]) for name, weight in kept.items()), kind


@pytest.mark.parametrize("name", ["killed", "ended"])
def test_a_killed_run_ends_with_the_same_model(runs, name):
    for kind, folder in runs.items():
        assert chosen(result(folder / name)) == chosen(result(folder / "whole")), kind
