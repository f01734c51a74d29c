"""Test runs on two ranks with gloo: the best checkpoint, and DPO's precomputed reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e.test_best_checkpoint import BEST, chosen
from tests.e2e.test_resume import computed, configure
from tests.integration.ranks import run_ranks
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

SAVE_STEPS = 2
SETTINGS = f"""
method.args.max_steps=24 method.args.save_steps={SAVE_STEPS} method.selection.patience=2
precision=fp32 hardware.gpus_per_node=2 topology.num_gpus=2
method.args.per_device_train_batch_size=4
""".split()
LORA = ["adapter=lora", "adapter.rank=4"]
FULL = "topology.fsdp.state_dict_type=FULL_STATE_DICT"
KINDS = {"fsdp": {"full": [FULL], "lora": LORA}, "zero3": {"complete": []}}
DPO = """
model.num_layers=2 precision=fp32 data.num_train=16 hardware.gpus_per_node=2 topology.num_gpus=2
effective_batch=4 method.args.per_device_train_batch_size=2 method.args.max_steps=3
method.args.save_strategy=no method.args.learning_rate=1e-3 method.args.warmup_steps=0
topology=fsdp
""".split()


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tmp_path_factory) -> dict[str, Path]:
    """Return kind -> a directory with a complete run and one that resumes after its best step."""
    home, kinds = tmp_path_factory.mktemp(request.param), KINDS[request.param]
    for kind, overrides in kinds.items():
        (home / kind).mkdir()
        for name in ("complete", "killed"):
            topology = f"topology={request.param}"
            configure(home / kind / name, "sft", *BEST, *SETTINGS, topology, *overrides)
    folders = {kind: home / kind for kind in kinds}
    steps = [
        step
        for folder in folders.values()
        for step in (folder / "complete", f"{folder}/complete:{folder}/killed:best+{SAVE_STEPS}")
    ]
    run_ranks("sft", *steps)
    return folders


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def weights(saved: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Return the complete weights of a checkpoint, which FSDP may have sharded."""
    sharded = saved / "pytorch_model_fsdp_0"
    if sharded.is_dir():
        dcp_to_torch_save(sharded, scratch)
        state = torch.load(scratch, weights_only=True)["model"]
        # PEFT's name of the adapter is `default`.
        return {name.replace(".default.", "."): weight for name, weight in state.items()}
    if (saved / "pytorch_model_fsdp.bin").is_file():
        return torch.load(saved / "pytorch_model_fsdp.bin", weights_only=True)
    return load_file(next(saved.glob("*model.safetensors")))


def test_use_best_checkpoint_also_after_resume(runs, tmp_path):
    """Compare with the last checkpoint too, which must have other weights."""
    for kind, folder in runs.items():
        complete, outcome = folder / "complete", result(folder / "complete")
        by_step = {
            row["step"]: row["eval_loss"] for row in computed(complete) if "eval_loss" in row
        }
        assert outcome["best_step"] == min(by_step, key=by_step.get) < outcome["steps"], kind
        model = "adapter/adapter_model" if kind == "lora" else "model/model"
        saved = load_file(complete / f"{model}.safetensors")
        best, last = (
            weights(complete / f"checkpoints/checkpoint-{outcome[key]}", tmp_path / key)
            for key in ("best_step", "steps")
        )
        assert all(weight.equal(best[name]) for name, weight in saved.items()), kind
        assert not all(weight.equal(last[name]) for name, weight in saved.items()), kind
        assert chosen(result(folder / "killed")) == chosen(outcome), kind


def test_precomputed_reference_has_same_losses_under_fsdp(tmp_path):
    """Use random weights, which TRL could not load by name."""
    run_dirs = [tmp_path / beforehand for beforehand in ("false", "true")]
    for run_dir in run_dirs:
        configure(run_dir, "dpo", *DPO, f"method.args.precompute_ref_log_probs={run_dir.name}")
    run_ranks("dpo", *run_dirs)
    in_memory, beforehand = map(losses, run_dirs)
    assert in_memory[-1] != pytest.approx(in_memory[0], abs=1e-3), "it trains"
    assert beforehand == pytest.approx(in_memory, rel=0, abs=1e-5)
